//! Which module gets which width: `--bits` and `--group-size` for all, `--set` for some, MLX's default for routers.

use std::str::FromStr;

use anyhow::{Result, ensure};
use sluice_model::{Description, WeightClass, WeightDescription};

/// How a module is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    /// As it is in the input.
    Plain,
    /// Affine groups along the input.
    Affine { bits: u8, group: u16 },
    /// MXFP4, as it is in the input.
    Mxfp4,
}

/// What a rule is for.
#[derive(Clone, Debug, PartialEq)]
enum Means {
    /// Modules whose name matches one of these: the pattern with each `{A-B}` replaced by a number of that range.
    Names(Vec<String>),
    Class(WeightClass),
}

impl Width {
    /// Whether rows of `cols` inputs divide into its groups.
    fn fits(self, cols: usize) -> bool {
        matches!(self, Width::Affine { group, .. } if cols > 0 && cols.is_multiple_of(group as usize))
    }
}

/// A matrix as rules see it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Module<'a> {
    /// All that a pattern may match.
    pub names: &'a [&'a str],
    pub class: WeightClass,
    /// It belongs to the MTP head.
    pub mtp: bool,
}

impl<'a> Module<'a> {
    /// A matrix of a model.
    pub fn of(description: &Description, weight: &WeightDescription, names: &'a [&'a str]) -> Module<'a> {
        Module { names, class: weight.class, mtp: description.is_of_mtp(weight) }
    }
}

/// One `--set PATTERN=BITS[:GROUP]`, a line of a recipe, or `--experts-bits`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    pattern: String,
    means: Means,
    /// `None` leaves the module as it is; the group size falls back to `--group-size`.
    width: Option<(u8, Option<u16>)>,
}

impl FromStr for Rule {
    type Err = String;
    fn from_str(text: &str) -> Result<Rule, String> {
        let (pattern, width) = text.rsplit_once('=').ok_or("expected PATTERN=BITS[:GROUP]")?;
        if pattern.is_empty() {
            return Err("the pattern is empty".into());
        }
        let (pattern, width) = (pattern.trim().to_owned(), width.trim());
        let means = Means::Names(expand(&pattern)?);
        if matches!(width, "none" | "bf16") {
            return Ok(Rule { pattern, means, width: None });
        }
        let (bits, group) = match width.split_once(':') {
            Some((bits, group)) => (bits, Some(parse_group(group)?)),
            None => (width, None),
        };
        Ok(Rule { pattern, means, width: Some((parse_bits(bits)?, group)) })
    }
}

impl Rule {
    /// The experts of all layers.
    pub fn experts(bits: u8) -> Rule {
        let (pattern, means) = ("routed experts".to_owned(), Means::Class(WeightClass::Expert));
        Rule { pattern, means, width: Some((bits, None)) }
    }

    fn fits(&self, module: Module) -> bool {
        match &self.means {
            Means::Names(patterns) => module.names.iter().any(|name| patterns.iter().any(|p| matches(p, name))),
            Means::Class(class) => *class == module.class && !module.mtp,
        }
    }
}

/// The rules of a recipe: one `PATTERN=BITS[:GROUP]` a line; what follows a `#` is a comment.
pub fn parse_recipe(text: &str) -> Result<Vec<Rule>, String> {
    let lines = text.lines().enumerate().map(|(i, line)| (i + 1, line.split('#').next().unwrap_or("").trim()));
    let rules = lines.filter(|(_, line)| !line.is_empty());
    rules.map(|(number, line)| line.parse().map_err(|e| format!("line {number}: {e}"))).collect()
}

/// The patterns that one with ranges `{A-B}` stands for.
fn expand(pattern: &str) -> Result<Vec<String>, String> {
    let Some((before, rest)) = pattern.split_once('{') else { return Ok(vec![pattern.to_owned()]) };
    let wrong = || format!("{pattern:?}: expected a range of numbers in braces, such as {{0-9}}");
    let (range, after) = rest.split_once('}').ok_or_else(wrong)?;
    let (first, last) = range.split_once('-').ok_or_else(wrong)?;
    let number = |n: &str| n.parse::<usize>().map_err(|_| wrong());
    let (first, last) = (number(first)?, number(last)?);
    if first > last || last > 9999 {
        return Err(wrong());
    }
    let after = expand(after)?;
    Ok((first..=last).flat_map(|n| after.iter().map(move |a| format!("{before}{n}{a}"))).collect())
}

/// A width that MLX has.
pub fn parse_bits(text: &str) -> Result<u8, String> {
    let bits = text.parse().ok().filter(|b| matches!(b, 2 | 3 | 4 | 5 | 6 | 8));
    bits.ok_or_else(|| format!("{text:?} bits: expected 2, 3, 4, 5, 6 or 8"))
}

/// A group size that MLX has.
pub fn parse_group(text: &str) -> Result<u16, String> {
    let group = text.parse().ok().filter(|g| matches!(g, 32 | 64 | 128));
    group.ok_or_else(|| format!("groups of {text:?}: expected 32, 64 or 128"))
}

/// What the rules say of one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub width: Width,
    /// A rule wants it left as it is.
    pub left: bool,
    /// It stays as it is because its rows do not divide into the groups that were wanted.
    pub undivided: bool,
}

/// All that was asked for.
#[derive(Clone, Debug)]
pub struct Rules {
    pub(crate) bits: u8,
    pub(crate) group: u16,
    /// The last that matches a module decides.
    set: Vec<Rule>,
    /// Whether each of `set` has matched something yet.
    matched: Vec<bool>,
}

impl Rules {
    /// `bits` per weight in groups of `group` for all modules that no rule of `set` is for; of these the last that matches decides.
    pub fn new(bits: u8, group: u16, set: Vec<Rule>) -> Rules {
        let matched = vec![false; set.len()];
        Rules { bits, group, set, matched }
    }

    /// The width of a matrix with rows of `cols`. Where the groups do not divide the rows, the matrix stays as it is, as in MLX.
    pub(crate) fn of(&mut self, module: Module, cols: usize) -> Choice {
        let mut chosen = None;
        for (rule, matched) in self.set.iter().zip(&mut self.matched) {
            if rule.fits(module) {
                *matched = true;
                chosen = Some(rule.width);
            }
        }
        let all = Width::Affine { bits: self.bits, group: self.group };
        let wanted = match chosen {
            Some(None) => return Choice { width: Width::Plain, left: true, undivided: false },
            Some(Some((bits, group))) => Width::Affine { bits, group: group.unwrap_or(self.group) },
            None if !all.fits(cols) => all,
            // A router decides by small differences, and is small: MLX keeps it at 8 bits.
            None if module.class == WeightClass::Router => Width::Affine { bits: 8, group: 64 },
            // An MTP head is small, and drafts worse with every bit that it loses.
            None if module.mtp => Width::Affine { bits: self.bits.max(8), group: self.group },
            None => all,
        };
        let fits = wanted.fits(cols);
        Choice { width: if fits { wanted } else { Width::Plain }, left: false, undivided: !fits }
    }

    /// (bits, group size) that a rule asks for by name; rules that leave a module as it is ask for nothing.
    pub(crate) fn asked_for(&mut self, module: Module) -> Option<(u8, u16)> {
        let mut chosen = None;
        for (rule, matched) in self.set.iter().zip(&mut self.matched) {
            if rule.fits(module) {
                *matched = true;
                chosen = rule.width;
            }
        }
        chosen.map(|(bits, group)| (bits, group.unwrap_or(self.group)))
    }

    /// Refuses rules that matched no module: a mistyped pattern would otherwise go unnoticed.
    pub(crate) fn check_all_matched(&self) -> Result<()> {
        let idle = self.set.iter().zip(&self.matched).find(|(_, matched)| !**matched);
        ensure!(
            idle.is_none(),
            "--set, --experts-bits or recipe: no module matches {:?}",
            idle.map_or("", |(rule, _)| &rule.pattern)
        );
        Ok(())
    }
}

/// Whether `name` matches `pattern`, in which `*` stands for any run of characters (dots too) and `?` for any one.
fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    // Where to go on when the rest does not fit: the last star takes one character more.
    let mut retry: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                retry = Some((p, n));
                p += 1;
            }
            Some(&c) if c == b'?' || c == name[n] => (p, n) = (p + 1, n + 1),
            _ => match &mut retry {
                Some((star, taken)) => {
                    *taken += 1;
                    (p, n) = (*star + 1, *taken);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mlp<'a>(names: &'a [&'a str]) -> Module<'a> {
        Module { names, class: WeightClass::Mlp, mtp: false }
    }

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name, fits) in [
            ("embed_tokens", "embed_tokens", true),
            ("embed_tokens", "model.embed_tokens", false),
            ("*.mlp.experts*", "layers.0.mlp.experts.gate_proj", true),
            ("*.mlp.experts*", "layers.0.mlp.gate", false),
            ("layers.?.*proj", "layers.7.self_attn.q_proj", true),
            ("layers.?.*proj", "layers.17.self_attn.q_proj", false),
            ("*a*ab", "xaabab", true),
            ("*a*ab", "xaaba", false),
            ("**", "", true),
            ("?", "", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }

    #[test]
    fn the_last_rule_that_matches_decides() {
        let set = ["layers.*=4:32", "*.down_proj=none", "layers.1.*=6"].map(|r| r.parse().unwrap());
        let mut rules = Rules::new(2, 64, set.to_vec());
        let affine = |bits, group| Width::Affine { bits, group };
        let mut width = |name: &str| rules.of(mlp(&[name]), 128).width;
        assert_eq!(width("layers.0.mlp.up_proj"), affine(4, 32));
        assert_eq!(width("layers.0.mlp.down_proj"), Width::Plain);
        assert_eq!(width("embed_tokens"), affine(2, 64));
        assert!(rules.check_all_matched().unwrap_err().to_string().contains("layers.1.*"));
        assert_eq!(rules.of(mlp(&["layers.1.mlp.down_proj"]), 128).width, affine(6, 64));
        rules.check_all_matched().unwrap();
        assert!(rules.of(mlp(&["layers.0.mlp.down_proj"]), 128).left);
    }

    #[test]
    fn routers_keep_8_bits_and_odd_rows_stay_plain() {
        let mut rules = Rules::new(2, 128, vec!["lm_head=4:64".parse().unwrap()]);
        let affine = |bits, group| Choice { width: Width::Affine { bits, group }, left: false, undivided: false };
        let plain = Choice { width: Width::Plain, left: false, undivided: true };
        let router = Module { names: &["layers.0.mlp.gate"], class: WeightClass::Router, mtp: false };
        assert_eq!(rules.of(router, 256), affine(8, 64));
        assert_eq!(rules.of(router, 192), plain);
        assert_eq!(rules.of(mlp(&["layers.0.mlp.gate_proj"]), 192), plain);
        assert_eq!(rules.of(mlp(&["lm_head"]), 192), affine(4, 64));
        assert_eq!(rules.of(mlp(&["lm_head"]), 96), plain);
        // The MTP head has 8 bits, unless a rule names it.
        let mut rules = Rules::new(4, 64, vec![Rule::experts(3), "mtp.fc=6".parse().unwrap()]);
        let of_head = |names, class| Module { names, class, mtp: true };
        assert_eq!(rules.of(of_head(&["mtp.layers.0.mlp.experts.up_proj"], WeightClass::Expert), 128), affine(8, 64));
        assert_eq!(rules.of(of_head(&["mtp.fc"], WeightClass::Mlp), 128), affine(6, 64));
        let expert = Module { names: &["layers.0.mlp.experts.up_proj"], class: WeightClass::Expert, mtp: false };
        assert_eq!(rules.of(expert, 128), affine(3, 64));
    }

    #[test]
    fn a_recipe_is_rules_by_line_with_ranges_of_layers() {
        let text = "# finer at both ends\nlayers.{0-2}.mlp.experts.* = 4\n\nlayers.{10-11}.mlp.experts.down_proj=3:32 # sensitive\n";
        let mut rules = Rules::new(2, 64, parse_recipe(text).unwrap());
        let mut bits = |name: &str| rules.asked_for(mlp(&[name]));
        assert_eq!(bits("layers.2.mlp.experts.up_proj"), Some((4, 64)));
        assert_eq!(bits("layers.3.mlp.experts.up_proj"), None);
        assert_eq!(bits("layers.11.mlp.experts.down_proj"), Some((3, 32)));
        rules.check_all_matched().unwrap();
        assert!(parse_recipe("a=4\nb=9").unwrap_err().contains("line 2"));
        for wrong in ["x{1=4", "x{1}=4", "x{3-1}=4", "x{a-b}=4", "x{0-99999}=4"] {
            assert!(parse_recipe(wrong).unwrap_err().contains("{0-9}"), "{wrong}");
        }
    }

    #[test]
    fn a_malformed_rule_says_why() {
        for (text, why) in
            [("x", "PATTERN=BITS"), ("=4", "empty"), ("x=7", "bits"), ("x=4:48", "groups"), ("x=4:", "groups")]
        {
            assert!(text.parse::<Rule>().unwrap_err().contains(why), "{text}");
        }
    }
}
