//! The results of the cases, by instruction set and device.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sluice_conformance::Outcome;

/// Wrong cases whose difference is kept.
const KEPT: usize = 20;

/// The results of an instruction set or a device.
pub struct Found {
    pub name: String,
    pub right: u64,
    /// Cases about a weight format that a device has no kernels for.
    pub refused: u64,
    /// Kind of operation, seed and difference.
    pub wrong: Vec<(&'static str, u64, String)>,
}

/// All results.
pub struct Table {
    pub rows: Vec<Found>,
    /// Cases of each kind of operation.
    pub families: BTreeMap<&'static str, u64>,
}

impl Table {
    pub fn new(names: &[String]) -> Table {
        let row = |name: &String| Found { name: name.clone(), right: 0, refused: 0, wrong: Vec::new() };
        Table { rows: names.iter().map(row).collect(), families: BTreeMap::new() }
    }

    /// Notes a case: an outcome for each row, in their order.
    pub fn note(&mut self, family: &'static str, seed: u64, outcomes: Vec<Outcome>) {
        *self.families.entry(family).or_default() += 1;
        for (row, outcome) in self.rows.iter_mut().zip(outcomes) {
            match outcome {
                Outcome::Agrees => row.right += 1,
                Outcome::Refuses(_) => row.refused += 1,
                Outcome::Differs(what) if row.wrong.len() < KEPT => row.wrong.push((family, seed, what)),
                Outcome::Differs(_) => {}
            }
        }
    }
}

impl Found {
    /// For people.
    pub fn line(&self) -> String {
        let refused = if self.refused > 0 {
            format!(", {} about formats that it does not take", self.refused)
        } else {
            String::new()
        };
        match self.wrong.len() {
            0 => format!("right: {} cases{refused}", self.right),
            wrong => format!("WRONG: {wrong} cases or more; {} are right{refused}", self.right),
        }
    }

    pub fn to_json(&self) -> Value {
        let wrong: Vec<Value> = self
            .wrong
            .iter()
            .map(|(family, seed, what)| json!({"kind": family, "seed": seed, "difference": what}))
            .collect();
        json!({"name": self.name, "right": self.right, "refused": self.refused, "wrong": wrong})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_bits_are_counted_where_they_were_computed() {
        let mut table = Table::new(&["generic".into(), "avx2".into()]);
        table.note("logits", 3, vec![Outcome::Agrees, Outcome::Differs("row 0".into())]);
        table.note("logits", 4, vec![Outcome::Agrees, Outcome::Agrees]);
        assert_eq!(table.rows[0].line(), "right: 2 cases");
        assert!(table.rows[1].line().starts_with("WRONG: 1 cases or more; 1 are right"), "{}", table.rows[1].line());
        assert_eq!(table.rows[1].to_json()["wrong"][0]["seed"], 3);
        assert_eq!(table.families["logits"], 2);
    }
}
