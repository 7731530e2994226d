//! The backend that a checker has do the work.

use std::ops::{Deref, DerefMut};

use sluice_backend::Backend;

/// The backend inside: the checker's own, or one that is lent for a while.
pub enum Inner<'a> {
    Own(Box<dyn Backend>),
    Lent(&'a mut dyn Backend),
}

impl<'a> Deref for Inner<'a> {
    type Target = dyn Backend + 'a;
    fn deref(&self) -> &Self::Target {
        match self {
            Inner::Own(own) => &**own,
            Inner::Lent(lent) => &**lent,
        }
    }
}

impl DerefMut for Inner<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Inner::Own(own) => &mut **own,
            Inner::Lent(lent) => &mut **lent,
        }
    }
}
