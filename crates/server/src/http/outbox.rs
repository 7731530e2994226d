//! Bytes that wait to be sent to a client. A slow client never blocks the task that makes its answer: text goes into a bounded buffer, and an answer whose client
//! falls too far behind is ended.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use axum::body::Bytes;
use futures_util::Stream;

/// Bytes that may wait for one client, besides what its connection buffers. The event that crosses the limit is still accepted.
const MAX_PER_CLIENT: usize = 256 << 10;
/// Bytes that may wait for one client even when the budget for all is used up.
const MIN_PER_CLIENT: usize = 8 << 10;

/// The budget for bytes that wait for all clients together, and for those that are kept until an answer is complete.
#[derive(Debug)]
pub struct SendBudget {
    bytes: AtomicUsize,
    max: usize,
    kept: AtomicUsize,
    max_kept: usize,
}

impl SendBudget {
    /// `max`: bytes that may wait for all clients together. `max_kept`: bytes that may be kept for all answers together.
    pub fn new(max: usize, max_kept: usize) -> SendBudget {
        SendBudget { bytes: AtomicUsize::new(0), max, kept: AtomicUsize::new(0), max_kept }
    }
}

/// What one answer keeps until it is complete, as far as it grows with the number of its tokens and is not its text.
pub struct KeptBytes {
    send_budget: Arc<SendBudget>,
    bytes: usize,
}

impl KeptBytes {
    /// Nothing yet.
    pub fn new(send_budget: &Arc<SendBudget>) -> KeptBytes {
        KeptBytes { send_budget: Arc::clone(send_budget), bytes: 0 }
    }

    /// Counts so many bytes from now on. Returns whether all answers together are within the budget.
    #[must_use]
    pub fn grow_to(&mut self, bytes: usize) -> bool {
        let more = bytes.saturating_sub(self.bytes);
        self.bytes += more;
        more == 0 || self.send_budget.kept.fetch_add(more, Ordering::Relaxed) + more <= self.send_budget.max_kept
    }

    /// Whether this answer alone is above the budget.
    pub fn is_too_much(&self) -> bool {
        self.bytes > self.send_budget.max_kept
    }
}

impl Drop for KeptBytes {
    fn drop(&mut self) {
        self.send_budget.kept.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Buffer {
    text: Vec<u8>,
    /// The answer is complete.
    is_complete: bool,
    /// The outbox was dropped.
    writer_is_gone: bool,
    reader: Option<Waker>,
}

struct SharedBuffer {
    buffer: Mutex<Buffer>,
    send_budget: Arc<SendBudget>,
}

impl SharedBuffer {
    fn buffer(&self) -> MutexGuard<'_, Buffer> {
        self.buffer.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Empties the buffer.
    fn drain(&self, buffer: &mut Buffer) -> Vec<u8> {
        let text = std::mem::take(&mut buffer.text);
        self.send_budget.bytes.fetch_sub(text.len(), Ordering::Relaxed);
        text
    }
}

/// The writing end. Dropping it before [`Outbox::finish`] marks the answer as cut off.
pub struct Outbox(Arc<SharedBuffer>);

/// The reading end, a stream of bytes for the client.
pub struct OutboxReader(Arc<SharedBuffer>);

/// A new buffer's two ends.
pub fn outbox(send_budget: &Arc<SendBudget>) -> (Outbox, OutboxReader) {
    let shared = Arc::new(SharedBuffer { buffer: Mutex::default(), send_budget: Arc::clone(send_budget) });
    (Outbox(Arc::clone(&shared)), OutboxReader(shared))
}

impl Outbox {
    /// Appends text. Returns false, and appends nothing, if the client is too far behind.
    #[must_use]
    pub fn push(&self, text: &str) -> bool {
        let mut buffer = self.0.buffer();
        let (own, all) = (buffer.text.len(), self.0.send_budget.bytes.load(Ordering::Relaxed));
        let has_room = own <= MAX_PER_CLIENT && (all <= self.0.send_budget.max || own <= MIN_PER_CLIENT);
        if has_room {
            self.put(&mut buffer, text);
        }
        has_room
    }

    /// Appends the last text, for which there is always room.
    pub fn finish(self, text: &str) {
        let mut buffer = self.0.buffer();
        buffer.is_complete = true;
        self.put(&mut buffer, text);
    }

    fn put(&self, buffer: &mut Buffer, text: &str) {
        self.0.send_budget.bytes.fetch_add(text.len(), Ordering::Relaxed);
        buffer.text.extend_from_slice(text.as_bytes());
        if let Some(reader) = buffer.reader.take() {
            reader.wake();
        }
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        let mut buffer = self.0.buffer();
        buffer.writer_is_gone = true;
        if let Some(reader) = buffer.reader.take() {
            reader.wake();
        }
    }
}

impl Stream for OutboxReader {
    type Item = io::Result<Bytes>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        let mut buffer = self.0.buffer();
        if !buffer.text.is_empty() {
            return Poll::Ready(Some(Ok(self.0.drain(&mut buffer).into())));
        }
        if buffer.is_complete {
            return Poll::Ready(None);
        }
        if buffer.writer_is_gone {
            // The connection closes before the body's end, so the client does not take this for all of it.
            return Poll::Ready(Some(Err(io::ErrorKind::ConnectionAborted.into())));
        }
        buffer.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for OutboxReader {
    fn drop(&mut self) {
        self.0.drain(&mut self.0.buffer());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next(reader: &mut OutboxReader) -> Poll<Option<io::Result<Bytes>>> {
        Pin::new(reader).poll_next(&mut Context::from_waker(Waker::noop()))
    }

    fn text(reader: &mut OutboxReader) -> Vec<u8> {
        match next(reader) {
            Poll::Ready(Some(Ok(bytes))) => bytes.to_vec(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_was_put_there_comes_out_whole() {
        let send_budget = Arc::new(SendBudget::new(1 << 20, 0));
        let (outbox, mut reader) = outbox(&send_budget);
        assert!(next(&mut reader).is_pending());
        assert!(outbox.push("one, ") && outbox.push("two"));
        assert_eq!(text(&mut reader), b"one, two");
        assert!(next(&mut reader).is_pending());
        outbox.finish(", three");
        assert_eq!(text(&mut reader), b", three");
        assert!(matches!(next(&mut reader), Poll::Ready(None)));
        assert_eq!(send_budget.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn an_answer_that_was_cut_off_does_not_end_like_a_whole_one() {
        let (outbox, mut reader) = outbox(&Arc::new(SendBudget::new(1 << 20, 0)));
        assert!(outbox.push("one"));
        drop(outbox);
        assert_eq!(text(&mut reader), b"one");
        assert!(matches!(next(&mut reader), Poll::Ready(Some(Err(_)))));
    }

    /// Pushes until there is no more room, and returns the number of bytes accepted.
    fn filled(outbox: &Outbox) -> usize {
        let event = "x".repeat(1000);
        (0..).take_while(|_| outbox.push(&event)).count() * event.len()
    }

    #[test]
    fn nobody_is_further_behind_than_the_limit_and_reading_makes_room() {
        let send_budget = Arc::new(SendBudget::new(1 << 30, 0));
        let (outbox, mut reader) = outbox(&send_budget);
        let first = filled(&outbox);
        assert!((MAX_PER_CLIENT..=MAX_PER_CLIENT + 1000).contains(&first), "{first}");
        assert_eq!(text(&mut reader).len(), first);
        assert_eq!(filled(&outbox), first);
        // The last text is always accepted, and nothing is counted once the client is gone.
        outbox.finish("the end");
        drop(reader);
        assert_eq!(send_budget.bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_all_answers_keep_is_bounded_and_given_back() {
        let send_budget = Arc::new(SendBudget::new(0, 100));
        let [mut one, mut other] = [KeptBytes::new(&send_budget), KeptBytes::new(&send_budget)];
        assert!(one.grow_to(50) && other.grow_to(50) && one.grow_to(50));
        assert!(!one.grow_to(51) && !one.is_too_much());
        drop(one);
        assert!(other.grow_to(100) && !other.grow_to(101) && other.is_too_much());
        drop(other);
        assert_eq!(send_budget.kept.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn all_clients_together_are_no_further_behind_than_their_limit() {
        let send_budget = Arc::new(SendBudget::new(100_000, 0));
        let pairs: Vec<_> = (0..10).map(|_| outbox(&send_budget)).collect();
        let all: usize = pairs.iter().map(|(outbox, _)| filled(outbox)).sum();
        assert!((100_000..=100_000 + 10 * (MIN_PER_CLIENT + 1000)).contains(&all), "{all}");
        // A new client has some room even if others have used up the budget.
        let late = outbox(&send_budget);
        assert!(filled(&late.0) >= MIN_PER_CLIENT);
        drop(pairs);
        assert!(filled(&late.0) > MIN_PER_CLIENT);
    }
}
