//! Lists that several threads use in parallel, each its own part.

use std::cell::UnsafeCell;
use std::ops::Range;

/// A slice that several threads write, each its own part.
pub struct Parts<'a, T>(*mut T, usize, std::marker::PhantomData<&'a mut [T]>);

// SAFETY: access goes through `get`, whose callers keep threads apart.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Parts<'a, T> {
        Parts(slice.as_mut_ptr(), slice.len(), std::marker::PhantomData)
    }

    /// Elements `range`, to write.
    ///
    /// # Safety
    /// Nobody else uses these elements during the borrow.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.1);
        // SAFETY: inside the slice, as just checked, and used by nobody else, as the caller guarantees.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(range.start), range.len()) }
    }
}

/// One `T` for each thread of the pool.
pub struct PerThread<T>(Vec<UnsafeCell<T>>);

// SAFETY: `get` hands each thread its own.
unsafe impl<T: Send> Sync for PerThread<T> {}

impl<T: Default> PerThread<T> {
    pub fn new(threads: usize) -> Self {
        PerThread((0..threads).map(|_| UnsafeCell::default()).collect())
    }

    /// The given thread's own.
    ///
    /// # Safety
    /// Only the task that runs as `thread` calls this, and it keeps one borrow at a time.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn get(&self, thread: usize) -> &mut T {
        // SAFETY: the pool never runs two tasks as the same thread at once.
        unsafe { &mut *self.0[thread].get() }
    }

    /// Every thread's own. `&mut`: no task is running.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().map(UnsafeCell::get_mut)
    }
}

/// Makes a list at least this long.
pub fn grow<T: Default + Clone>(v: &mut Vec<T>, len: usize) {
    if v.len() < len {
        v.resize(len, T::default());
    }
}

/// `len` elements of `v`, which grows to the largest use and then stays.
pub fn part(v: &mut Vec<f32>, len: usize) -> &mut [f32] {
    grow(v, len);
    &mut v[..len]
}
