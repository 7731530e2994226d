//! The state that all requests share.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::http::error::ApiError;
use crate::http::settings::{Settings, max_body, permits};
use crate::metrics::Metrics;
use crate::models::loaded::LoadedModel;
use crate::models::manager::ModelManager;

/// How long a body may wait for memory that other bodies hold.
const MEMORY_WAIT: Duration = Duration::from_secs(5);

/// The state that all requests share.
pub struct AppState {
    /// The models that are offered.
    pub models: Arc<ModelManager>,
    /// Counters for `/metrics`.
    pub metrics: Arc<Metrics>,
    /// How the server was set up.
    pub settings: Settings,
    /// Whether the server is reached over TCP, and only from this machine.
    pub on_loopback: bool,
    body_memory: Arc<Semaphore>,
    /// Bytes that `body_memory` stands for when all is free.
    body_bytes: usize,
}

impl AppState {
    /// `context`: the longest context of any model, in tokens.
    pub fn new(
        models: Arc<ModelManager>,
        metrics: Arc<Metrics>,
        settings: Settings,
        on_loopback: bool,
        context: usize,
    ) -> AppState {
        let body_bytes = settings.limits.body_memory(context);
        let body_memory = Arc::new(Semaphore::new(permits(body_bytes)));
        AppState { models, metrics, settings, on_loopback, body_memory, body_bytes }
    }

    /// The model that a request names, loaded.
    ///
    /// # Errors
    /// As [`ModelManager::get`].
    pub async fn model(&self, name: Option<&str>) -> Result<Arc<LoadedModel>, ApiError> {
        self.models.get(name).await
    }

    /// Bytes of the largest body that is accepted.
    pub fn max_body(&self) -> usize {
        max_body(self.models.max_context()).min(self.body_bytes)
    }

    /// Reserves memory for a body of this many bytes.
    ///
    /// # Errors
    /// When none becomes free in time.
    pub async fn reserve_body(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let permit = Arc::clone(&self.body_memory).acquire_many_owned(permits(bytes) as u32);
        let permit = timeout(MEMORY_WAIT, permit).await.ok().and_then(Result::ok);
        let full = || ApiError {
            retry_after: Some(1),
            ..ApiError::unavailable(
                "the bodies of other requests take all the memory there is for them; try again later",
            )
        };
        permit.ok_or_else(full)
    }
}
