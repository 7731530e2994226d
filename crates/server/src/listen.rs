//! Connections: how many there may be, how long a client may take, and how they end.

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

use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::runtime::Limits;

/// Bytes that a connection buffers each way, and of a request's line and headers.
const BUFFER: usize = 32 << 10;
/// Connections that are told at once that there are too many; more are closed without a word.
const TOLD: usize = 32;
/// How long one of them may take to hear it.
const TELLING: Duration = Duration::from_secs(1);

/// Answers whoever connects until `leaving` holds; then takes no more connections, and ends when those that there are have their answers. Dropped, it closes them.
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
    let [places, told] = [limits.connections, TOLD].map(|n| Arc::new(Semaphore::new(n)));
    let mut connections = JoinSet::new();
    let mut left = pin!(left(leaving.clone()));
    loop {
        let stream = tokio::select! {
            () = &mut left => break,
            Some(_) = connections.join_next() => continue,
            (stream, _) = listener.accept() => stream,
        };
        if let Ok(place) = Arc::clone(&places).try_acquire_owned() {
            let (router, leaving, connected) = (router.clone(), leaving.clone(), metrics.connected());
            connections.spawn(async move {
                answer(stream, router, limits, leaving).await;
                drop((place, connected));
            });
        } else if let Ok(place) = Arc::clone(&told).try_acquire_owned() {
            connections.spawn(refuse(stream, limits.connections, place));
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Waits until the server is left. One that is gone is left as well.
async fn left(mut leaving: watch::Receiver<bool>) {
    let _ = leaving.wait_for(|leaves| *leaves).await;
}

async fn answer<S>(stream: S, router: Router, limits: Limits, leaving: watch::Receiver<bool>)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.header_time).max_buf_size(BUFFER);
    let stream = TokioIo::new(Patient { stream, patience: limits.write_time, waits: None });
    let mut connection = pin!(http.serve_connection(stream, TowerToHyperService::new(router)));
    // What goes wrong with a connection concerns its client alone.
    tokio::select! {
        _ = &mut connection => return,
        () = left(leaving) => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

async fn refuse<S>(mut stream: S, most: usize, _place: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let error = ApiError::unavailable(format!("{most} connections are open already; try again later"));
    let body = error.to_json().to_string();
    let head =
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close";
    let said = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let telling = async {
        stream.write_all(said.as_bytes()).await?;
        stream.shutdown().await?;
        // A connection that is closed before its request was read is reset, and the answer is lost.
        let mut rest = [0; 1024];
        while stream.read(&mut rest).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = timeout(TELLING, telling).await;
}

/// A connection that fails when its other end takes nothing for too long.
struct Patient<S> {
    stream: S,
    patience: Duration,
    /// Since something was to be written that could not be.
    waits: Option<Pin<Box<Sleep>>>,
}

impl<S> Patient<S> {
    fn within(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.waits = None;
            return written;
        }
        let patience = self.patience;
        let waits = self.waits.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(waits.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.within(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.within(cx, written)
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
