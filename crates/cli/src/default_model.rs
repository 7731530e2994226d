//! The model that runs if the command line names none: the one of a setting, or else the demo model.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Result, bail};

/// The model that a setting names.
static CONFIGURED: OnceLock<PathBuf> = OnceLock::new();

/// Sets the model that a setting names; the first call counts.
pub fn set_configured(folder: PathBuf) {
    let _ = CONFIGURED.set(folder);
}

/// The model that a setting names, if one does.
pub fn configured() -> Option<&'static Path> {
    CONFIGURED.get().map(PathBuf::as_path)
}

/// The demo model's folder. Looks in this order: `SLUICE_DEMO`; `models/demo` in the folders above the executable; `share/sluice/demo` next to its
/// `bin`; `models/demo` in the current folder and those above it.
///
/// # Errors
/// When none of them has it; the message lists them all.
pub fn demo_folder() -> Result<PathBuf> {
    if let Some(named) = env::var_os("SLUICE_DEMO") {
        // Used as it is: the loader reports any problem with it.
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
        "the demo model was not found: SLUICE_DEMO is not set, and tried {}; name a model's folder instead",
        tried.join(", ")
    )
}
