//! Who owns a Unix socket.

use std::fs;
use std::os::unix::net::{UnixDatagram, UnixListener};

use sluice_server::Bound;

fn bind(path: &std::path::Path) -> anyhow::Result<Bound> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(Bound::unix(path))
}

#[test]
fn only_a_socket_that_nobody_listens_on_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    // 1. A live one that refuses connections
    let path = folder.path().join("alive");
    let alive = UnixDatagram::bind(&path).unwrap();
    let error = format!("{:#}", bind(&path).err().unwrap());
    assert!(error.contains("alive") && error.contains("remove it"), "{error}");
    UnixDatagram::unbound().unwrap().send_to(b"hello", &path).unwrap();
    assert_eq!(alive.recv(&mut [0; 16]).unwrap(), 5);
    // 2. One with a listening server
    let path = folder.path().join("listening");
    let listening = UnixListener::bind(&path).unwrap();
    let error = format!("{:#}", bind(&path).err().unwrap());
    assert!(error.contains("a server listens there already"), "{error}");
    // 3. The same when its server is gone; the new server removes it in the end
    drop(listening);
    let bound = bind(&path).unwrap();
    drop(bound);
    assert!(!path.exists());
    // 4. A file that is not a socket stays
    fs::write(&path, "mine").unwrap();
    assert!(bind(&path).is_err());
    assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
}

#[test]
fn a_server_that_ends_leaves_the_socket_of_another_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let first = bind(&path).unwrap();
    fs::rename(&path, folder.path().join("aside")).unwrap();
    let second = bind(&path).unwrap();
    drop(first);
    assert!(path.exists());
    drop(second);
    assert!(!path.exists());
}
