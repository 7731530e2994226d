//! Opens the smaller model that drafts for a larger one.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use sluice_backend::{AttentionMode, Device, Lookahead};
use sluice_model::ModelSource;

use super::Engine;
use super::drafting::{Drafter, Follower};
use super::role::{MakeBackend, Role};
use crate::draft::DrafterChoice;
use crate::options::{Options, Placement};
use crate::setup::limits::hard_limits;

/// It gets one part in this many of each memory limit, at most.
pub(super) const PART: u64 = 4;

/// Opens the model that is to draft for that of `source`, if there is one, and takes what it may use from the memory of `options`.
///
/// # Errors
/// Those of opening a model; the message names the option. No model where one was asked for.
pub(super) fn open(
    source: &Arc<dyn ModelSource>,
    options: &mut Options,
    make: MakeBackend,
) -> Result<Option<Box<dyn Drafter>>> {
    let choice = options.drafts.drafter;
    let path = options.draft_model.clone().filter(|_| matches!(choice, DrafterChoice::Auto | DrafterChoice::Model));
    let Some(path) = path else {
        if choice == DrafterChoice::Model {
            bail!("a model is to draft, and none is named: --draft-model");
        }
        return Ok(None);
    };
    let named = || format!("--draft-model {}", path.display());
    let opened = || -> Result<Engine> {
        let larger = sluice_model::describe(source.config(), &options.model(1))?;
        let source = sluice_model::source::open(&path)?;
        let own = sluice_model::describe(source.config(), &sluice_model::Options::default())?;
        let context = options.max_context.unwrap_or(larger.max_context).min(own.max_context);
        Engine::open_as(Role::Follows, &source, of_follower(options, context), make)
    };
    let mut engine = opened().with_context(named)?;
    options.caller_memory += engine.setup.claimed;
    let on_device = engine.memory_uses().into_iter().filter(|used| used.device != Device::Host);
    let on_device: u64 = on_device.map(|used| used.bytes as u64).sum();
    options.device_memory = options.device_memory.map(|bytes| bytes.saturating_sub(on_device));
    let states = engine.setup.draft_states.as_ref().map(|rows| rows.start);
    Ok(Some(Box::new(Follower::new(engine, states))))
}

/// Options like those of the larger model, where they say how to compute and not what.
fn of_follower(options: &Options, context: usize) -> Options {
    let rooms = hard_limits(options).into_iter().map(|limit| limit.bytes.saturating_sub(limit.taken));
    let others = rooms.min().map_or(0, |room| room - room / PART);
    Options {
        kv_type: None,
        attention: AttentionMode::F32,
        max_context: Some(context),
        kv_tokens: None,
        prompt_cache: None,
        kv_spill: 0,
        experts_per_token: None,
        drafts: options.drafts.off(),
        draft_model: None,
        profile: false,
        kv_reserve: None,
        caller_memory: options.caller_memory + others,
        experts: Placement::Auto,
        expert_budget: None,
        expert_options: Default::default(),
        lookahead: Lookahead::Auto,
        ..options.clone()
    }
}
