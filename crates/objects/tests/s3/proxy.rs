//! What is between a replica and the store, and does wrong on demand.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    None,
    /// Connections break.
    Breaks,
    /// Nothing more arrives, and nothing ends.
    Stalls,
    /// Answers end too early.
    Cuts,
    /// Bytes of objects change.
    Changes,
    /// Answers come at 100 kB/s.
    Crawls,
    /// The server dies. This is done elsewhere.
    Killed,
}

impl Fault {
    pub const ALL: [Fault; 6] =
        [Fault::Breaks, Fault::Stalls, Fault::Cuts, Fault::Changes, Fault::Crawls, Fault::Killed];
}

/// Passes connections on to a port.
pub struct Proxy {
    port: u16,
    fault: Arc<Mutex<Fault>>,
}

impl Proxy {
    pub fn start(to: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let fault = Arc::new(Mutex::new(Fault::None));
        let shared = Arc::clone(&fault);
        thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let fault = Arc::clone(&shared);
                thread::spawn(move || {
                    let Ok(far) = TcpStream::connect(("127.0.0.1", to)) else { return };
                    let (near_again, far_again) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                    let back = Arc::clone(&fault);
                    thread::spawn(move || pass(far_again, near_again, &back, true));
                    pass(near, far, &fault, false);
                });
            }
        });
        Proxy { port, fault }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn set(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, fault: &Mutex<Fault>, is_answer: bool) {
    let mut buffer = vec![0; 16 << 10];
    let mut total = 0;
    while let Ok(n) = from.read(&mut buffer) {
        if n == 0 {
            break;
        }
        total += n;
        let now = *fault.lock().unwrap();
        match now {
            Fault::Breaks => break,
            Fault::Stalls => {
                while *fault.lock().unwrap() == Fault::Stalls {
                    thread::sleep(Duration::from_millis(10));
                }
                break;
            }
            Fault::Cuts if is_answer && total > 20_000 => break,
            // Beyond the head of an answer.
            Fault::Changes if is_answer && n > 8000 => buffer[n / 2] ^= 1,
            Fault::Crawls if is_answer => thread::sleep(Duration::from_millis(n as u64 / 100)),
            _ => {}
        }
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
