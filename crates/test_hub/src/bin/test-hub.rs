//! `test-hub FOLDER [ADDRESS [BYTES]]`: serves FOLDER/ORG/NAME/.. as a hub, to measure beside other programs, of weights at most BYTES in a second. Prints its address.

use std::fs;
use std::path::{Path, PathBuf};

use sluice_test_hub::{Content, TestHub};

fn folders(of: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(of).unwrap_or_else(|e| panic!("{}: {e}", of.display()));
    entries.flatten().map(|e| e.path()).collect()
}

fn main() {
    let mut args = std::env::args().skip(1);
    let root = PathBuf::from(args.next().expect("test-hub FOLDER [ADDRESS [BYTES]]"));
    let hub = TestHub::at(&args.next().unwrap_or_else(|| "127.0.0.1:0".to_owned()));
    let bandwidth = args.next().map(|bytes| bytes.parse().expect("BYTES is a number"));
    hub.faults(|faults| faults.bandwidth = bandwidth);
    for repo in folders(&root).iter().flat_map(|org| folders(org)) {
        let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
        let files: Vec<(String, Content)> =
            folders(&repo).into_iter().map(|file| (name(&file), Content::Disk(file))).collect();
        let files: Vec<(&str, Content)> = files.iter().map(|(name, content)| (&**name, content.clone())).collect();
        hub.commit(&format!("{}/{}", name(repo.parent().unwrap()), name(&repo)), &files);
    }
    println!("{}", hub.endpoint());
    loop {
        std::thread::park();
    }
}
