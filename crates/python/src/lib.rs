//! `sluice._sluice`: the part of the Python package that is Rust. It has an engine with the server's scheduler, streams of tokens and replies, a tokenizer, arrays, and
//! the reader of safetensors. What Python people see (`sluice`) is written in Python on top of it, in `python/sluice`.
//!
//! Whatever waits or computes does so without the interpreter's lock, and looks for signals meanwhile. Errors are exceptions of `sluice.errors`; a panic becomes one as well.
// What PyO3's macros write is theirs.
#![deny(unsafe_code)]

mod arrays;
mod engine;
mod errors;
mod files;
mod inbox;
mod names;
mod options;
mod processor;
mod prompt_cache;
mod reply;
mod request;
mod score;
mod stage;
mod stream;
mod tokenizer;
mod waiting;

use pyo3::prelude::*;

/// The module.
#[pymodule]
fn _sluice(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("NUMERICS_VERSION", sluice_backend::NUMERICS_VERSION)?;
    module.add_class::<arrays::Array>()?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<files::LoadedFile>()?;
    module.add_class::<prompt_cache::PromptCache>()?;
    module.add_class::<reply::Reply>()?;
    module.add_class::<stage::Stage>()?;
    module.add_class::<stream::Stream>()?;
    module.add_class::<tokenizer::Tokenizer>()?;
    module.add_function(wrap_pyfunction!(names::resolve, module)?)?;
    module.add_function(wrap_pyfunction!(stage::layer_count, module)?)?;
    Ok(())
}
