//! Exceptions, which are classes of `sluice.errors`, and what becomes one.

use std::any::Any;

use pyo3::PyErr;

pyo3::import_exception!(sluice.errors, ModelError);
pyo3::import_exception!(sluice.errors, RequestError);
pyo3::import_exception!(sluice.errors, EngineError);

/// A model, or a file of one, that cannot be found, read or loaded.
pub fn model(error: &anyhow::Error) -> PyErr {
    ModelError::new_err(format!("{error:#}"))
}

/// A request that cannot be computed as it is.
pub fn request(error: &anyhow::Error) -> PyErr {
    RequestError::new_err(format!("{error:#}"))
}

/// An engine that does not work, or not any more.
pub fn engine(error: &anyhow::Error) -> PyErr {
    EngineError::new_err(format!("{error:#}"))
}

/// An argument that is none.
pub fn argument(name: &str, expected: &str, found: impl std::fmt::Display) -> PyErr {
    RequestError::new_err(format!("{name} must be {expected}, found {found}"))
}

/// A panic, which is a bug here.
pub fn panicked(panic: &(dyn Any + Send)) -> PyErr {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("it did not say why");
    let version = env!("CARGO_PKG_VERSION");
    EngineError::new_err(format!("this is a bug in sluice, please report it: {text:?}, version {version}"))
}
