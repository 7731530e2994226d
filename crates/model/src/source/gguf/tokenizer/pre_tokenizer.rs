//! How text is cut into words before bytes are merged: what each name of `tokenizer.ggml.pre` stands for.
//!
//! The expressions are those of the models' own `tokenizer.json`. Names that stand for the same rules have one entry.

use anyhow::Result;
use serde_json::{Value as Json, json};

use super::super::metadata::Metadata;
use super::keys::{ARCHITECTURE, PRE};

/// The rules of a name.
pub(super) struct PreTokenizer {
    names: &'static [&'static str],
    /// Applied one after the other, each to the pieces of the one before.
    cuts: &'static [Cut],
    /// Whether text is composed by Unicode's form NFC first.
    pub nfc: bool,
    /// Whether a word that is a token is used without merges.
    pub ignore_merges: bool,
    /// Whether a text begins with the beginning-of-sequence token, if the file does not say.
    pub adds_bos: bool,
}

/// A rule that cuts pieces into smaller ones.
enum Cut {
    /// What matches is a piece of its own, and so is what lies between matches.
    Matches(&'static str),
    /// Each digit is a piece of its own.
    Digits,
    /// GPT-2's words.
    Gpt2,
}

use Cut::{Digits, Gpt2, Matches};

/// GPT-2's words as an expression, for rules that cut them further.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Kimi's own expression: words of Han characters are by themselves.
const KIMI_K2: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_V3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
/// Letters that have a case, as DeepSeek lists them.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+";
const DEEPSEEK_MARKS: &str = r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+";
const DEEPSEEK_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+";
const DEEPSEEK_V3_CJK: &str = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+";
const BLOOM: &str = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+";

/// What most entries have.
const PLAIN: PreTokenizer =
    PreTokenizer { names: &[], cuts: &[Gpt2], nfc: false, ignore_merges: false, adds_bos: false };

static KNOWN: [PreTokenizer; 30] = [
    PreTokenizer {
        names: &["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        cuts: &[Matches(LLAMA3)],
        ignore_merges: true,
        adds_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["dbrx", "smaug-bpe", "glm4", "glm5", "chatglm-bpe"], cuts: &[Matches(LLAMA3)], ..PLAIN },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen", "megrez", "f2llmv2"],
        cuts: &[Matches(QWEN2)],
        nfc: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"],
        cuts: &[Matches(QWEN2)],
        ..PLAIN
    },
    PreTokenizer { names: &["qwen35"], cuts: &[Matches(QWEN35)], nfc: true, ..PLAIN },
    PreTokenizer {
        names: &["deepseek-llm"],
        cuts: &[
            Matches(r"[\r\n]"),
            Matches(DEEPSEEK_LETTERS),
            Matches(DEEPSEEK_MARKS),
            Matches(r"\s+$"),
            Matches(DEEPSEEK_CJK),
            Matches(r"\p{N}+"),
        ],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        cuts: &[Matches(r"[\r\n]"), Matches(r"\s?\p{L}+"), Matches(r"\s?\p{P}+"), Matches(DEEPSEEK_CJK), Digits],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        cuts: &[Matches(r"\p{N}{1,3}"), Matches(DEEPSEEK_V3_CJK), Matches(DEEPSEEK_V3)],
        ..PLAIN
    },
    PreTokenizer {
        names: &["gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion", "granite-docling"],
        ..PLAIN
    },
    PreTokenizer { names: &["olmo", "mpt"], nfc: true, ..PLAIN },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"],
        cuts: &[Digits, Gpt2],
        ..PLAIN
    },
    PreTokenizer { names: &["command-r"], cuts: &[Digits, Gpt2], nfc: true, ..PLAIN },
    PreTokenizer { names: &["tekken"], cuts: &[Matches(TEKKEN)], ignore_merges: true, adds_bos: true, ..PLAIN },
    PreTokenizer { names: &["gpt-4o", "llama4"], cuts: &[Matches(GPT4O)], ignore_merges: true, ..PLAIN },
    PreTokenizer { names: &["kimi-k2"], cuts: &[Matches(KIMI_K2)], ignore_merges: true, ..PLAIN },
    PreTokenizer { names: &["kanana2", "talkie", "minimax-m2"], cuts: &[Matches(GPT4O)], ..PLAIN },
    PreTokenizer {
        names: &["tiny_aya", "cohere2moe"],
        cuts: &[Matches(r"\d{1,3}(?=(?:\d{3})*\b)"), Matches(GPT4O)],
        ..PLAIN
    },
    PreTokenizer {
        names: &["falcon"],
        cuts: &[Matches(r"[\p{P}\$\+<=>\^~\|`]+"), Matches(GPT2), Matches("[0-9][0-9][0-9]")],
        ..PLAIN
    },
    PreTokenizer {
        names: &["default"],
        cuts: &[Matches(r"[\p{P}\$\+<=>\^~\|]+"), Matches(GPT2), Matches(r"\p{N}+"), Matches("[0-9][0-9][0-9]")],
        ..PLAIN
    },
    PreTokenizer { names: &["bloom", "poro-chat", "gpt3-finnish"], cuts: &[Matches(BLOOM)], ..PLAIN },
    PreTokenizer { names: &["viking"], cuts: &[Matches(BLOOM), Digits], ..PLAIN },
    PreTokenizer {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        cuts: &[Matches(
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )],
        ..PLAIN
    },
    PreTokenizer {
        names: &["seed-coder"],
        cuts: &[Matches(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        )],
        ..PLAIN
    },
    PreTokenizer {
        names: &["exaone-moe"],
        cuts: &[Matches(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )],
        ..PLAIN
    },
    PreTokenizer {
        names: &["minicpm5"],
        cuts: &[
            Matches(r"\p{N}{1,3}"),
            Matches(
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
        ],
        ignore_merges: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["ufakzeka"],
        cuts: &[Matches(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")],
        ..PLAIN
    },
    PreTokenizer { names: &["laguna"], cuts: &[Matches(r"[^\n]+|[\n]+"), Matches(QWEN2)], ..PLAIN },
    PreTokenizer {
        names: &["jais-2"],
        cuts: &[Matches(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
        )],
        ..PLAIN
    },
    PreTokenizer {
        names: &["youtu"],
        cuts: &[
            Matches(
                r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
            ),
            Matches(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ),
        ],
        ignore_merges: true,
        ..PLAIN
    },
    PreTokenizer {
        names: &["spark2_5"],
        cuts: &[
            Matches(r"\p{N}{1,3}"),
            Matches(DEEPSEEK_V3_CJK),
            Matches(
                r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##,
            ),
            Digits,
        ],
        ..PLAIN
    },
];

/// The rules of a byte-level file. Old files do not name them: some families have never had but one.
///
/// # Errors
/// A name that is not known.
pub(super) fn named(metadata: &Metadata) -> Result<&'static PreTokenizer> {
    let name = match (metadata.string(PRE)?, metadata.string(ARCHITECTURE)?) {
        (Some(name), _) => name,
        (None, Some("qwen2" | "qwen2moe" | "qwen3" | "qwen3moe" | "qwen3next")) => "qwen2",
        (None, Some("qwen35" | "qwen35moe")) => "qwen35",
        (None, _) => "default",
    };
    KNOWN.iter().find(|known| known.names.contains(&name)).ok_or_else(|| {
        let known: Vec<&str> = KNOWN.iter().flat_map(|known| known.names).copied().collect();
        metadata.wrong(PRE, &format!("is {name:?}, a rule that is not known (known are {})", known.join(", ")))
    })
}

impl PreTokenizer {
    /// As `tokenizer.json` writes it; the last step turns bytes into characters.
    pub fn to_json(&self) -> Json {
        let bytes = |use_regex| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": use_regex});
        let mut steps = Vec::new();
        let mut by_regex = false;
        for cut in self.cuts {
            match cut {
                Matches(regex) => steps.push(
                    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}),
                ),
                Digits => steps.push(json!({"type": "Digits", "individual_digits": true})),
                // Always the last one: it is part of the step to bytes.
                Gpt2 => by_regex = true,
            }
        }
        steps.push(bytes(by_regex));
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}
