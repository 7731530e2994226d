//! A server's life: it starts, answers requests, and ends in an order that lets running requests finish.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::http::connections;
use crate::http::listen::Bound;
use crate::http::routes::router;
use crate::http::settings::Settings;
use crate::http::state::AppState;
use crate::log::note;
use crate::metrics::Metrics;
use crate::models::loaded::LoadedModel;
use crate::models::manager::{ModelManager, Offer};

/// How long a server whose engine has failed goes on answering with the reason.
const FAILURE_ANSWERS: Duration = Duration::from_secs(3);
/// How long clients may read the rest of their answers when the engine has ended.
const READING_TIME: Duration = Duration::from_secs(10);
/// How long the engine may take to end once its time is up.
const ENDING_TIME: Duration = Duration::from_secs(30);

/// A server that listens.
pub struct Server {
    app: Arc<AppState>,
    bound: Bound,
}

impl Server {
    /// `offers`: the models that can be served; the first is loaded at the start. `on_loaded` is called for each model that was loaded.
    pub fn new(
        bound: Bound,
        settings: Settings,
        offers: Vec<Offer>,
        on_loaded: impl Fn(&LoadedModel) + Send + Sync + 'static,
    ) -> Server {
        let metrics = Arc::new(Metrics::new());
        let context = offers.iter().map(|offer| offer.context).max().unwrap_or(0);
        let on_loopback = matches!(bound, Bound::Tcp(_)) && bound.is_local();
        let models = ModelManager::new(offers, Arc::clone(&metrics), settings.clone(), Box::new(on_loaded));
        let app = AppState::new(Arc::new(models), metrics, settings, on_loopback, context);
        Server { app: Arc::new(app), bound }
    }

    /// Answers requests until `stop` resolves; then running requests may finish within the grace period. The first model loads in the meantime, and until
    /// it is ready requests are answered with 503. The server also ends if the first model cannot be loaded, or if an engine fails.
    ///
    /// # Errors
    /// Why the first model could not be loaded, or why an engine has failed.
    pub async fn run(self, stop: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        let Server { app, bound } = self;
        let (models, metrics, limits) = (Arc::clone(&app.models), Arc::clone(&app.metrics), app.settings.limits);
        if let Some(after) = app.settings.idle_unload {
            tokio::spawn(Arc::clone(&models).unload_when_idle(after));
        }
        let (leave, leaving) = watch::channel(false);
        let router = router(app)?;
        let mut serving = JoinSet::new();
        let _socket_file = match bound {
            Bound::Tcp(listener) => {
                use axum::serve::ListenerExt;
                // A token is a few bytes, which must not wait for more.
                let listener = listener.tap_io(|stream| _ = stream.set_nodelay(true));
                serving.spawn(connections::serve(listener, router, limits, metrics, leaving));
                None
            }
            Bound::Unix(listener, file) => {
                serving.spawn(connections::serve(listener, router, limits, metrics, leaving));
                Some(file)
            }
        };
        // 1. Serve until told to stop, or until something fails
        let mut why = tokio::select! {
            () = stop => None,
            Err(e) = models.start() => Some(e),
            why = models.failed() => {
                sleep(FAILURE_ANSWERS).await;
                Some(engine_ended(&why))
            }
        };
        // 2. End the engine; no client can delay it
        models.stop();
        leave.send_replace(true);
        if why.is_none() && timeout(limits.grace, models.ended()).await.is_err() {
            note("the grace period is over: requests that still run are cancelled");
            models.abort();
        }
        let is_over = timeout(ENDING_TIME, models.ended()).await.is_ok();
        // 3. Let clients read the rest, and close connections
        let _ = timeout(READING_TIME, serving.join_next()).await;
        serving.shutdown().await;
        why = why.or_else(|| models.failure().map(|failure| engine_ended(&failure)));
        if why.is_none() && !is_over {
            why = Some(anyhow!("the engine has not ended in time; prompts that were to be kept may be lost"));
        }
        why.map_or(Ok(()), Err)
    }
}

fn engine_ended(why: &str) -> anyhow::Error {
    anyhow!("the engine has ended: {why}")
}
