//! An engine on the device that was asked for.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Error, Result};
use sluice_engine::{Engine, ModelSource, Options, refused_by_device};

use crate::device::{self, Device, DeviceArg};

/// Opens a model's engine; its weights may still be loading. Where no device was asked for by name, the next one does where one has no room for the model or
/// lacks an operation of it; `say` hears of each choice, in a line.
///
/// # Errors
/// Anything wrong with a file of the model, or a device that cannot be used; the message names it.
pub fn open(source: &Arc<dyn ModelSource>, options: Options, asked: &DeviceArg, say: &dyn Fn(&str)) -> Result<Engine> {
    let open = |device: &Device, mut options: Options| {
        options.load.ahead = !device.is_host();
        Engine::open_source(source, options, &|options| device.backend(options))
    };
    let mut device = asked.chosen(say);
    loop {
        let opened = open(&device, options.clone());
        let next = match &opened {
            Err(why) if *asked == DeviceArg::Auto && refused_by_device(why) => {
                device.and_another().unwrap_or_else(device::host)
            }
            _ => return opened.map_err(|e| naming(source.path(), e)),
        };
        device = next;
        if let Err(why) = opened {
            say(&format!("device: {device} instead: {why:#}"));
        }
    }
}

/// Puts the model's path in front of an error, unless the error names it already.
pub fn naming(path: &Path, error: Error) -> Error {
    let name = path.display().to_string();
    if format!("{error:#}").contains(&name) { error } else { error.context(name) }
}
