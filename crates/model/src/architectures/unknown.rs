//! What to say of an architecture that is not supported: the nearest that is, and what is missing.

/// Types that people run: the beginning of their names, the nearest supported type, and what no operation computes of them. Longer beginnings come first.
const KNOWN: [(&str, &str, &str); 13] = [
    ("gemma3n", "gemma4_text", "alternating updates of several residuals, and sparse activations"),
    ("falcon_h1", "granitemoehybrid", "Mamba-2 and attention side by side"),
    ("bamba", "granitemoehybrid", "rotated parts of heads"),
    ("mamba", "granitemoehybrid", "models of Mamba layers alone"),
    ("jamba", "granitemoehybrid", "Mamba layers of the first kind"),
    ("lfm2", "llama", "short convolutions as token mixers"),
    ("minimax_m3", "minimax_m2", "a sparse indexer"),
    ("minimax", "minimax_m2", "lightning attention"),
    ("llama4", "mixtral", "attention in chunks"),
    ("olmoe", "olmo2", "experts behind norms of outputs"),
    ("cohere", "llama", "layer norms, and halves of a layer side by side"),
    ("qwen2_moe", "qwen3_moe", "biases of queries, keys and values beside a shared expert"),
    ("phimoe", "mixtral", "layer norms and its router"),
];

/// The nearest supported type and what is missing, in words; nothing where no name is near.
pub fn nearest(kind: &str, supported: &[&str]) -> String {
    let known = KNOWN.iter().find(|(begin, near, _)| kind.starts_with(begin) && supported.contains(near));
    if let Some((_, near, missing)) = known {
        return format!(": the nearest that is, {near:?}, is without {missing}");
    }
    let distance = |other: &&str| edits(kind, other);
    match supported.iter().copied().min_by_key(distance) {
        Some(near) if edits(kind, near) * 3 <= kind.len() => format!("; did you mean {near:?}?"),
        _ => String::new(),
    }
}

/// Letters to add, drop or replace, to make one name of the other. Of names of which one is very long only as many as their lengths differ by.
fn edits(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() > 64 || b.len() > 64 {
        return a.len().abs_diff(b.len()).max(1);
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let kept = corner + usize::from(x != y);
            corner = row[j + 1];
            row[j + 1] = kept.min(row[j] + 1).min(corner + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::architectures::supported;

    #[test]
    fn the_nearest_type_is_named_with_what_is_missing() {
        let all = supported();
        let said = nearest("minimax_m3", &all);
        assert!(said.contains("\"minimax_m2\"") && said.contains("sparse indexer"), "{said}");
        assert!(nearest("gemma3n_text", &all).contains("alternating updates"));
        assert_eq!(nearest("qwen3_moee", &all), "; did you mean \"qwen3_moe\"?");
        assert_eq!(nearest("t5", &all), "");
        assert_eq!(nearest(&"x".repeat(1 << 20), &all), "");
        for (begin, near, _) in KNOWN {
            assert!(all.contains(&near) && !all.contains(&begin), "{begin} {near}");
        }
        assert_eq!((edits("", "ab"), edits("kitten", "sitting")), (2, 3));
    }
}
