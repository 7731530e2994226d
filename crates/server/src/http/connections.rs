//! Connections: how many may be open, how long a client may take, and how they end.

use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep, timeout};

use crate::http::error::ApiError;
use crate::http::settings::Limits;
use crate::metrics::Metrics;

/// Bytes that a connection buffers in each direction; also the limit for a request's line and headers.
const BUFFER: usize = 32 << 10;
/// How many refused connections may be receiving a 503 at once; beyond that they are closed without an answer.
const REFUSALS: usize = 32;
/// How long sending that 503 may take.
const REFUSAL_TIME: Duration = Duration::from_secs(1);

/// Serves connections until `leaving` becomes true. Then it accepts no more, and returns when the open ones have their answers. Dropping the future closes them.
pub async fn serve<L>(
    mut listener: L,
    router: Router,
    limits: Limits,
    metrics: Arc<Metrics>,
    leaving: watch::Receiver<bool>,
) where
    L: Listener,
    L::Addr: Debug,
{
    let [places, refusals] = [limits.connections, REFUSALS].map(|n| Arc::new(Semaphore::new(n)));
    let mut connections = JoinSet::new();
    let mut until_leaving = pin!(until_leaving(leaving.clone()));
    loop {
        let stream = tokio::select! {
            () = &mut until_leaving => break,
            Some(_) = connections.join_next() => continue,
            (stream, _) = listener.accept() => stream,
        };
        if let Ok(place) = Arc::clone(&places).try_acquire_owned() {
            let (router, leaving, connected) = (router.clone(), leaving.clone(), metrics.connected());
            connections.spawn(async move {
                answer(stream, router, limits, leaving).await;
                drop((place, connected));
            });
        } else if let Ok(place) = Arc::clone(&refusals).try_acquire_owned() {
            connections.spawn(refuse(stream, limits.connections, place));
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Waits until `leaving` becomes true, or its sender is gone.
async fn until_leaving(mut leaving: watch::Receiver<bool>) {
    let _ = leaving.wait_for(|leaves| *leaves).await;
}

async fn answer<S>(stream: S, router: Router, limits: Limits, leaving: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.header_time).max_buf_size(BUFFER);
    let stream = TokioIo::new(WriteTimeout { stream, limit: limits.write_time, timer: None });
    let mut connection = pin!(http.serve_connection(stream, TowerToHyperService::new(router)));
    // Errors of a connection concern only its client.
    tokio::select! {
        _ = &mut connection => return,
        () = until_leaving(leaving) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

async fn refuse<S>(mut stream: S, max: usize, _place: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let error = ApiError::unavailable(format!("{max} connections are open already; try again later"));
    let body = error.to_json().to_string();
    let head =
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close";
    let response = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let sending = async {
        stream.write_all(response.as_bytes()).await?;
        stream.shutdown().await?;
        // Closing before the request is read would reset the connection, and the client would lose the answer.
        let mut rest = [0; 1024];
        while stream.read(&mut rest).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = timeout(REFUSAL_TIME, sending).await;
}

/// A connection that fails if the other end reads nothing for too long.
struct WriteTimeout<S> {
    stream: S,
    limit: Duration,
    /// Runs while a write is blocked.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteTimeout<S> {
    fn with_timer(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.timer = None;
            return written;
        }
        let limit = self.limit;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteTimeout<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.with_timer(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.with_timer(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
