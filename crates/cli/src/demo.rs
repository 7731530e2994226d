//! Finding the demo model, which runs where no other is named.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

/// The demo model's folder: `SLUICE_DEMO`; `models/demo` in a folder above the executable; `share/sluice/demo` beside its `bin`;
/// `models/demo` here or in a folder above.
///
/// # Errors
/// When it is in none of them: the message names all.
pub fn folder() -> Result<PathBuf> {
    if let Some(named) = env::var_os("SLUICE_DEMO") {
        // A folder that is named is used; the loader reports what is wrong with it.
        return Ok(named.into());
    }
    let executable = env::current_exe().and_then(|p| p.canonicalize()).unwrap_or_default();
    let here = env::current_dir().unwrap_or_default();
    let installed = executable.parent().and_then(Path::parent).map(|p| p.join("share/sluice/demo"));
    let above = |from: &Path| from.ancestors().skip(1).map(|p| p.join("models/demo")).collect::<Vec<_>>();
    let mut places = above(&executable);
    places.extend(installed);
    places.push(here.join("models/demo"));
    places.extend(above(&here));
    if let Some(found) = places.iter().find(|p| p.join("config.json").is_file()) {
        return Ok(found.clone());
    }
    let near = |from: &Path| from.join("models/demo").display().to_string();
    let tried = [
        format!("models/demo in the folders above {}", executable.display()),
        executable
            .parent()
            .and_then(Path::parent)
            .map_or(String::new(), |p| format!("{}/share/sluice/demo", p.display())),
        format!("{} and the same in the folders above", near(&here)),
    ];
    bail!(
        "the demo model is not there: SLUICE_DEMO is not set, and tried {}; name a model's folder instead",
        tried.join(", ")
    )
}
