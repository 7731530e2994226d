//! What an engine or a server sends, received by threads of Python or by an event loop of asyncio. Neither needs a runtime of its own.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedReceiver;

/// What a wait has brought.
pub enum Received<T> {
    Item(T),
    /// There will be no more.
    End,
    NotYet,
}

/// A receiver with a bell for event loops.
pub struct Inbox<T> {
    receiver: UnboundedReceiver<T>,
    bell: Option<Bell>,
}

/// Two ends of a socket: a byte in it says that there is something to receive.
struct Bell {
    heard: UnixStream,
    waker: Waker,
}

struct Ring(UnixStream);

impl Wake for Ring {
    fn wake(self: Arc<Self>) {
        // If it is full, it rings already.
        let _ = (&self.0).write(&[1]);
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

impl<T> Inbox<T> {
    pub fn new(receiver: UnboundedReceiver<T>) -> Inbox<T> {
        Inbox { receiver, bell: None }
    }

    /// Waits for the next item, so long at most.
    pub fn wait(&mut self, at_most: Duration) -> Received<T> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let until = Instant::now() + at_most;
        loop {
            match self.receiver.poll_recv(&mut Context::from_waker(&waker)) {
                Poll::Ready(item) => return item.map_or(Received::End, Received::Item),
                Poll::Pending => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Received::NotYet;
                    }
                    thread::park_timeout(left);
                }
            }
        }
    }

    /// A descriptor that can be read as soon as there is something to [`Inbox::take`].
    ///
    /// # Errors
    /// When the system has no more descriptors.
    pub fn descriptor(&mut self) -> io::Result<i32> {
        if self.bell.is_none() {
            let (heard, rung) = UnixStream::pair()?;
            heard.set_nonblocking(true)?;
            rung.set_nonblocking(true)?;
            // Something may be there already.
            (&rung).write_all(&[1])?;
            self.bell = Some(Bell { heard, waker: Waker::from(Arc::new(Ring(rung))) });
        }
        Ok(self.bell.as_ref().map_or(-1, |bell| bell.heard.as_raw_fd()))
    }

    /// The next item, without waiting. After [`Received::NotYet`] the descriptor becomes readable when there is one.
    pub fn take(&mut self) -> Received<T> {
        let waker = self.bell.as_ref().map_or_else(|| Waker::noop().clone(), |bell| bell.waker.clone());
        if let Some(bell) = &mut self.bell {
            while matches!(bell.heard.read(&mut [0; 64]), Ok(1..)) {}
        }
        match self.receiver.poll_recv(&mut Context::from_waker(&waker)) {
            Poll::Ready(item) => item.map_or(Received::End, Received::Item),
            Poll::Pending => Received::NotYet,
        }
    }
}
