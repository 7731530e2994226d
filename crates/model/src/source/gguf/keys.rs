//! The keys of one architecture, and the tensors that go with them.

use std::collections::HashMap;

use anyhow::{Result, anyhow};

use super::header::TensorInfo;
use super::metadata::{Metadata, Value};

/// Metadata of one architecture.
pub struct Keys<'a> {
    pub metadata: &'a Metadata,
    /// What its keys begin with.
    pub prefix: &'static str,
    pub tensors: &'a HashMap<&'a str, &'a TensorInfo>,
}

impl Keys<'_> {
    /// The key that is `name` for this architecture.
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    /// An error about a key.
    pub fn wrong(&self, name: &str, what: &str) -> anyhow::Error {
        self.metadata.wrong(&self.key(name), what)
    }

    /// A count or size, if it is there. Where the key has a value for each layer, those above 0 must be equal.
    pub fn size_if(&self, name: &str) -> Result<Option<u64>> {
        let key = self.key(name);
        if !matches!(self.metadata.get(&key), Some(Value::Array(_))) {
            return self.metadata.unsigned(&key);
        }
        let each = self.metadata.integers(&key)?.unwrap_or_default();
        let mut above = each.iter().copied().filter(|&n| n != 0);
        let first = above.next().unwrap_or(0);
        if above.any(|n| n != first) {
            return Err(self.wrong(name, "differs from layer to layer, which is not supported"));
        }
        u64::try_from(first).map(Some).map_err(|_| self.wrong(name, "has numbers below 0"))
    }

    /// A count or size of each layer, if it is there: a value for each, or one for all.
    pub fn sizes(&self, name: &str, layers: u64) -> Result<Option<Vec<u64>>> {
        let key = self.key(name);
        if !matches!(self.metadata.get(&key), Some(Value::Array(_))) {
            return Ok(self.metadata.unsigned(&key)?.map(|size| vec![size; layers as usize]));
        }
        let each = self.metadata.integers(&key)?.unwrap_or_default();
        if each.len() as u64 != layers {
            return Err(self.wrong(name, &format!("has {} values for {layers} layers", each.len())));
        }
        let each: Result<_, _> = each.into_iter().map(u64::try_from).collect();
        each.map(Some).map_err(|_| self.wrong(name, "has numbers below 0"))
    }

    pub fn size(&self, name: &str) -> Result<u64> {
        self.size_if(name)?.ok_or_else(|| self.wrong(name, "is missing"))
    }

    pub fn float_if(&self, name: &str) -> Result<Option<f64>> {
        self.metadata.float(&self.key(name))
    }

    pub fn string_if(&self, name: &str) -> Result<Option<&str>> {
        self.metadata.string(&self.key(name))
    }

    pub fn tensor(&self, name: &str) -> Result<&TensorInfo> {
        let found = self.tensors.get(name).copied();
        found.ok_or_else(|| anyhow!("{}: no tensor {name:?}", self.metadata.path().display()))
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}
