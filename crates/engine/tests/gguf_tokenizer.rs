//! Tokenizers made of GGUF metadata give the ids of the models' own tokenizers.

use std::fs::File;
use std::path::{Path, PathBuf};

use sluice_engine::text::{Origin, Tokenizer};
use sluice_model::source::gguf::{Header, Metadata, tokenizer::MetadataFiles};

/// Where the real models are: `SLUICE_REAL_MODELS`, or `target/real-models`.
fn real(name: &str) -> Option<Metadata> {
    let folder = std::env::var_os("SLUICE_REAL_MODELS").map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/real-models"));
    let path = folder.join(name);
    let Ok(file) = File::open(&path) else {
        eprintln!("SKIPPED: no {}", path.display());
        return None;
    };
    Some(Header::read(&file, file.metadata().unwrap().len(), &path).unwrap().metadata)
}

#[test]
fn dump() {
    let Some(out) = std::env::var_os("DUMP") else { return };
    let cache = tempfile::tempdir().unwrap();
    for name in
        ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m.Q4_K_M.gguf", "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf"]
    {
        let begin = std::time::Instant::now();
        let Some(metadata) = real(name) else { continue };
        let header = begin.elapsed();
        let begin = std::time::Instant::now();
        let json = sluice_model::source::gguf::tokenizer::tokenizer_json(&metadata).unwrap();
        let made = begin.elapsed();
        std::fs::write(Path::new(&out).join(format!("{name}.json")), &json).unwrap();
        let files = MetadataFiles(&metadata);
        let begin = std::time::Instant::now();
        let first = Tokenizer::load(&files, Some(cache.path())).unwrap();
        let one = begin.elapsed();
        let begin = std::time::Instant::now();
        let tokenizer = Tokenizer::load(&files, Some(cache.path())).unwrap();
        println!(
            "{name}: header {header:?} json {made:?} {} bytes, load {one:?} {:?}, again {:?} {:?}",
            json.len(),
            first.origin(),
            begin.elapsed(),
            tokenizer.origin()
        );
        assert_eq!(tokenizer.origin(), Origin::Cached);
        let text = std::fs::read_to_string(Path::new(&out).join("text.txt")).unwrap();
        let begin = std::time::Instant::now();
        let ids = tokenizer.encode(&text, true).unwrap();
        println!("encode {:?} {} ids", begin.elapsed(), ids.len());
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        std::fs::write(Path::new(&out).join(format!("{name}.ids")), bytes).unwrap();
        let begin = std::time::Instant::now();
        std::fs::write(Path::new(&out).join(format!("{name}.txt")), tokenizer.decode(&ids, false).unwrap()).unwrap();
        println!("decode {:?}", begin.elapsed());
        for file in ["tokenizer_config.json", "generation_config.json"] {
            use sluice_model::source::TextFiles;
            println!("{}", String::from_utf8(files.read(file, 1 << 20).unwrap()).unwrap());
        }
    }
}
