//! A server inside of another program: the same models, scheduler, caches and endpoints, without sockets. What a client would send is passed by a call, and tokens
//! may be asked for without any dialect.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Method, Response, header};
use futures_util::StreamExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use sluice_engine::Engine;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::http::routes::router;
use crate::http::settings::Settings;
use crate::http::state::AppState;
use crate::metrics::Metrics;
use crate::models::loaded::LoadedModel;
use crate::models::manager::{ModelManager, Offer};
use crate::models::runtime::commands::Submission;
use crate::models::runtime::thread::{Refused, Ticket};

/// How long the engine may take to end.
const ENDING_TIME: Duration = Duration::from_secs(30);

/// A server without sockets, with one model.
pub struct LocalServer {
    /// `None` once it is closed.
    open: Option<Open>,
}

struct Open {
    runtime: Runtime,
    models: Arc<ModelManager>,
    model: Arc<LoadedModel>,
    service: TowerToHyperService<Router>,
}

/// A part of a reply.
#[derive(Debug)]
pub enum ReplyPart {
    /// Comes first: the status, and fields that were ignored, separated by commas.
    Head(u16, String),
    /// Bytes of the body.
    Body(Bytes),
    /// Why the body ends early.
    Failed(String),
}

/// A reply as it comes. Dropping it cancels what is left of the request.
pub struct Reply {
    /// Its parts; it ends after the last.
    pub parts: UnboundedReceiver<ReplyPart>,
    task: AbortHandle,
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl LocalServer {
    /// Loads the model. To be called outside of asynchronous code.
    ///
    /// # Errors
    /// Why the model cannot be loaded, or what of the settings is wrong.
    pub fn start(settings: Settings, offer: Offer) -> Result<LocalServer> {
        let runtime = Builder::new_multi_thread().worker_threads(1).thread_name("requests").enable_all().build()?;
        let (metrics, context) = (Arc::new(Metrics::new()), offer.context);
        let manager = ModelManager::new(vec![offer], Arc::clone(&metrics), settings.clone(), Box::new(|_| ()));
        let models = Arc::new(manager);
        let model = runtime.block_on(async {
            models.start().await?;
            models.get(None).await.map_err(|e| anyhow!("{}", e.message))
        })?;
        let app = AppState::new(Arc::clone(&models), metrics, settings, true, context);
        let service = TowerToHyperService::new(router(Arc::new(app))?);
        Ok(LocalServer { open: Some(Open { runtime, models, model, service }) })
    }

    fn open(&self) -> Result<&Open> {
        self.open.as_ref().context("the model is closed")
    }

    /// The model.
    ///
    /// # Errors
    /// When it is closed.
    pub fn model(&self) -> Result<&Arc<LoadedModel>> {
        Ok(&self.open()?.model)
    }

    /// Queues a submission.
    ///
    /// # Errors
    /// When the queue is full, or the engine takes no more.
    pub fn submit(&self, submission: Submission) -> Result<Ticket> {
        self.open()?.model.engine.submit(submission).map_err(|refused| match refused {
            Refused::Full(waiting) => anyhow!("{waiting} requests wait already"),
            Refused::Stopping => anyhow!("the model is closed"),
            Refused::Failed(why) => anyhow!("the engine has ended: {why}"),
        })
    }

    /// Has something done with the engine, between two steps. It is dropped undone if the engine has ended.
    ///
    /// # Errors
    /// When the model is closed.
    pub fn run(&self, work: impl FnOnce(&mut Engine) + Send + 'static) -> Result<()> {
        self.open()?.model.engine.run(work);
        Ok(())
    }

    /// Why the engine has failed; `None` while it works.
    pub fn failure(&self) -> Option<String> {
        self.open.as_ref().and_then(|open| open.models.failure())
    }

    /// Answers a request as the server does: `POST /v1/chat/completions` and the like.
    ///
    /// # Errors
    /// A method or a path that cannot be one; a model that is closed.
    pub fn request(&self, method: &str, path: &str, body: Vec<u8>) -> Result<Reply> {
        let open = self.open()?;
        let request = Request::builder()
            .method(Method::from_bytes(method.as_bytes()).with_context(|| format!("{method:?} is no method"))?)
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::CONTENT_LENGTH, body.len())
            .body(Body::from(body))
            .with_context(|| format!("{path:?} is no path"))?;
        let (sender, parts) = unbounded_channel();
        let answer = open.service.call(request);
        let task = open.runtime.spawn(async move {
            let response = match answer.await {
                Ok(response) => response,
                Err(never) => match never {},
            };
            send(response, &sender).await;
        });
        Ok(Reply { parts, task: task.abort_handle() })
    }

    /// Ends what runs and frees the model, with what is to be kept written to the prompt cache. Returns once the memory is free.
    pub fn close(&mut self) {
        let Some(Open { runtime, models, model, service }) = self.open.take() else { return };
        models.stop();
        models.abort();
        drop((model, service));
        runtime.block_on(async { _ = timeout(ENDING_TIME, models.ended()).await });
        runtime.shutdown_background();
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        self.close();
    }
}

async fn send(response: Response<Body>, to: &UnboundedSender<ReplyPart>) {
    let ignored = response.headers().get(crate::http::context::IGNORED_HEADER);
    let ignored = ignored.and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    let _ = to.send(ReplyPart::Head(response.status().as_u16(), ignored));
    let mut body = response.into_body().into_data_stream();
    while let Some(part) = body.next().await {
        let part = part.map_or_else(|e| ReplyPart::Failed(e.to_string()), ReplyPart::Body);
        if to.send(part).is_err() {
            return;
        }
    }
}
