//! What a path names, and how its tensors are laid out.

use std::path::{Path, PathBuf};

use sluice_model::source::{self, TextFiles, is_missing};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

#[test]
fn layouts_are_told_by_the_tensors() {
    let folders = std::fs::read_dir(golden()).unwrap().map(|e| e.unwrap().path());
    let mut seen = [0, 0];
    for folder in folders.filter(|f| f.join("config.json").exists()) {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let is_mlx = name.starts_with("mlx_");
        let layout = match name {
            "gpt_oss_mxfp4" | "kimi_k3" => "quantised safetensors",
            _ if is_mlx => "MLX",
            _ => "safetensors",
        };
        let tensors = source::open(&folder).unwrap().tensors().unwrap();
        assert_eq!(tensors.layout().name(), layout, "{}", folder.display());
        for t in tensors.checkpoint().tensors() {
            if let Some(short) = tensors.layout().short(&t.name) {
                assert_eq!(tensors.layout().full(&short), *t.name);
            }
        }
        seen[usize::from(is_mlx)] += 1;
    }
    assert!(seen[0] >= 13 && seen[1] >= 6, "{seen:?}");
}

#[test]
fn what_is_no_model_is_named() {
    let (dir, empty) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = dir.path().join("model.gguf");
    std::fs::write(&file, "GGUF").unwrap();
    for (path, what) in [
        (dir.path().join("nowhere"), "no such folder"),
        (file, "end of the file"),
        (empty.path().to_owned(), "config.json"),
    ] {
        let error = format!("{:#}", source::open(&path).err().unwrap());
        assert!(error.contains(what) && error.contains(path.to_str().unwrap()), "{error}");
    }
}

#[test]
fn text_files_are_those_of_the_folder() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("more")).unwrap();
    std::fs::write(dir.path().join("more/a.txt"), "abc").unwrap();
    let files = dir.path();
    assert_eq!(files.read("more/a.txt", 10).unwrap(), b"abc");
    assert!(files.has("more/a.txt") && !files.has("b.txt"));
    assert!(is_missing(&files.read("b.txt", 10).unwrap_err()));
    assert!(!is_missing(&files.read("more/a.txt", 2).unwrap_err()));
    assert_eq!(files.list("more").unwrap(), [("a.txt".to_owned(), 3)]);
    assert!(files.list("").unwrap().is_empty() && files.list("less").unwrap().is_empty());
}
