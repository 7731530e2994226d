//! What waits to be sent to a client. Whoever computes an answer is never held up by one who does not read it: texts go into a buffer with a limit, and an answer
//! whose client is too far behind ends.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use axum::body::Bytes;
use futures_util::Stream;

/// Bytes that may wait for one client, beside what its connection takes; the event that goes beyond is still taken.
const BEHIND: usize = 256 << 10;
/// So many may wait for each, however many wait for all.
const ANYWAY: usize = 8 << 10;

/// What waits for all clients together.
#[derive(Debug)]
pub struct Outgoing {
    bytes: AtomicUsize,
    most: usize,
}

impl Outgoing {
    /// `most`: bytes for all together.
    pub fn new(most: usize) -> Outgoing {
        Outgoing { bytes: AtomicUsize::new(0), most }
    }
}

#[derive(Default)]
struct Waiting {
    text: Vec<u8>,
    /// The answer is whole.
    is_whole: bool,
    /// Whoever filled it is gone.
    is_left: bool,
    reader: Option<Waker>,
}

struct Shared {
    waiting: Mutex<Waiting>,
    outgoing: Arc<Outgoing>,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// What waits is taken out.
    fn taken(&self, waiting: &mut Waiting) -> Vec<u8> {
        let text = std::mem::take(&mut waiting.text);
        self.outgoing.bytes.fetch_sub(text.len(), Ordering::Relaxed);
        text
    }
}

/// Where an answer is put. Dropped before [`Outbox::finish`], it is an answer that was cut off.
pub struct Outbox(Arc<Shared>);

/// Where it is taken from, as the client reads.
pub struct Sent(Arc<Shared>);

pub fn pair(outgoing: &Arc<Outgoing>) -> (Outbox, Sent) {
    let shared = Arc::new(Shared { waiting: Mutex::default(), outgoing: Arc::clone(outgoing) });
    (Outbox(Arc::clone(&shared)), Sent(shared))
}

impl Outbox {
    /// False, and nothing is put there, where the client is too far behind.
    #[must_use]
    pub fn push(&self, text: &str) -> bool {
        let mut waiting = self.0.waiting();
        let (own, all) = (waiting.text.len(), self.0.outgoing.bytes.load(Ordering::Relaxed));
        let has_room = own <= BEHIND && (all <= self.0.outgoing.most || own <= ANYWAY);
        if has_room {
            self.put(&mut waiting, text);
        }
        has_room
    }

    /// The last of it, for which there is always room.
    pub fn finish(self, text: &str) {
        let mut waiting = self.0.waiting();
        waiting.is_whole = true;
        self.put(&mut waiting, text);
    }

    fn put(&self, waiting: &mut Waiting, text: &str) {
        self.0.outgoing.bytes.fetch_add(text.len(), Ordering::Relaxed);
        waiting.text.extend_from_slice(text.as_bytes());
        if let Some(reader) = waiting.reader.take() {
            reader.wake();
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting();
        waiting.is_left = true;
        if let Some(reader) = waiting.reader.take() {
            reader.wake();
        }
    }
}

impl Stream for Sent {
    type Item = io::Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let mut waiting = self.0.waiting();
        if !waiting.text.is_empty() {
            return Poll::Ready(Some(Ok(self.0.taken(&mut waiting).into())));
        }
        if waiting.is_whole {
            return Poll::Ready(None);
        }
        if waiting.is_left {
            // The connection ends without the body's end: nobody takes this for all of it.
            return Poll::Ready(Some(Err(io::ErrorKind::ConnectionAborted.into())));
        }
        waiting.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.0.taken(&mut self.0.waiting());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(sent: &mut Sent) -> Poll<Option<io::Result<Bytes>>> {
        Pin::new(sent).poll_next(&mut Context::from_waker(Waker::noop()))
    }

    fn text(sent: &mut Sent) -> Vec<u8> {
        match next(sent) {
            Poll::Ready(Some(Ok(bytes))) => bytes.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_was_put_there_comes_out_whole() {
        let outgoing = Arc::new(Outgoing::new(1 << 20));
        let (outbox, mut sent) = pair(&outgoing);
        assert!(next(&mut sent).is_pending());
        assert!(outbox.push("one, ") && outbox.push("two"));
        assert_eq!(text(&mut sent), b"one, two");
        assert!(next(&mut sent).is_pending());
        outbox.finish(", three");
        assert_eq!(text(&mut sent), b", three");
        assert!(matches!(next(&mut sent), Poll::Ready(None)));
        assert_eq!(outgoing.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_answer_that_was_cut_off_does_not_end_like_a_whole_one() {
        let (outbox, mut sent) = pair(&Arc::new(Outgoing::new(1 << 20)));
        assert!(outbox.push("one"));
        drop(outbox);
        assert_eq!(text(&mut sent), b"one");
        assert!(matches!(next(&mut sent), Poll::Ready(Some(Err(_)))));
    }

    /// Pushes until there is no more room; bytes that were taken.
    fn filled(outbox: &Outbox) -> usize {
        let event = "x".repeat(1000);
        (0..).take_while(|_| outbox.push(&event)).count() * event.len()
    }

    #[test]
    fn nobody_is_further_behind_than_the_limit_and_reading_makes_room() {
        let outgoing = Arc::new(Outgoing::new(1 << 30));
        let (outbox, mut sent) = pair(&outgoing);
        let first = filled(&outbox);
        assert!((BEHIND..=BEHIND + 1000).contains(&first), "{first}");
        assert_eq!(text(&mut sent).len(), first);
        assert_eq!(filled(&outbox), first);
        // There is room for the last words, and none of it is counted when the client is gone.
        outbox.finish("the end");
        drop(sent);
        assert_eq!(outgoing.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn all_clients_together_are_no_further_behind_than_their_limit() {
        let outgoing = Arc::new(Outgoing::new(100_000));
        let pairs: Vec<_> = (0..10).map(|_| pair(&outgoing)).collect();
        let all: usize = pairs.iter().map(|(outbox, _)| filled(outbox)).sum();
        assert!((100_000..=100_000 + 10 * (ANYWAY + 1000)).contains(&all), "{all}");
        // Who begins while others are far behind has some room nevertheless.
        let late = pair(&outgoing);
        assert!(filled(&late.0) >= ANYWAY);
        drop(pairs);
        assert!(filled(&late.0) > ANYWAY);
    }
}
