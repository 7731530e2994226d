//! Drafts between steps: what drafters propose, how much of it is computed, and what is left of it after the step.

mod drafter;
mod follower;
mod lookup;
mod mtp;
mod planner;
mod settle;
mod trial;

pub(super) use drafter::{Drafter, EngineParts};
pub(super) use follower::Follower;
pub(super) use mtp::MtpHead;
pub(super) use planner::Drafting;
pub(super) use settle::settle;
