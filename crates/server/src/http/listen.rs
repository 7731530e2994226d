//! Where a server listens: a TCP address or a Unix socket.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use tokio::net::{TcpListener, UnixListener, UnixStream};

/// A listener that is bound to its address.
pub enum Bound {
    /// A TCP port.
    Tcp(TcpListener),
    /// A Unix socket, and the file that stands for it.
    Unix(UnixListener, SocketFile),
}

/// The file of a Unix socket. Dropping it removes the file, unless another server has replaced it.
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode at the time of binding.
    id: Option<(u64, u64)>,
}

impl SocketFile {
    fn new(path: &Path) -> SocketFile {
        SocketFile { path: path.to_owned(), id: SocketFile::id_of(path) }
    }

    fn id_of(path: &Path) -> Option<(u64, u64)> {
        fs::symlink_metadata(path).ok().map(|found| (found.dev(), found.ino()))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.id.is_some() && self.id == SocketFile::id_of(&self.path) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Bound {
    /// Binds a TCP port; port 0 takes a free one.
    ///
    /// # Errors
    /// When the address is taken or is not this machine's.
    pub async fn tcp(host: &str, port: u16) -> Result<Bound> {
        let listener = TcpListener::bind((host, port)).await;
        Ok(Bound::Tcp(listener.with_context(|| format!("cannot listen on {host}:{port}"))?))
    }

    /// Binds a Unix socket. The file of a server that is gone is replaced.
    ///
    /// # Errors
    /// When the path is not a socket, or a server may be listening on it.
    pub async fn unix(path: &Path) -> Result<Bound> {
        let name = || format!("cannot listen on {}", path.display());
        if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
            // Only one error means that nobody listens; the others come from a busy server, or from somebody else's.
            match UnixStream::connect(path).await {
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path).with_context(name)?,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => {
                    return Err(e).with_context(|| {
                        format!("{}: a server may be listening there; if none is, remove it", name())
                    });
                }
                Ok(_) => bail!("{}: a server listens there already", name()),
            }
        }
        let listener = UnixListener::bind(path).with_context(name)?;
        Ok(Bound::Unix(listener, SocketFile::new(path)))
    }

    /// Whether it can be reached only from this machine.
    pub fn is_local(&self) -> bool {
        match self {
            Bound::Tcp(listener) => listener.local_addr().is_ok_and(|address| address.ip().is_loopback()),
            Bound::Unix(..) => true,
        }
    }

    /// The address as a user would type it: `http://127.0.0.1:8080` or `unix:PATH`.
    ///
    /// # Errors
    /// When the system does not tell the address.
    pub fn address(&self) -> io::Result<String> {
        Ok(match self {
            Bound::Tcp(listener) => format!("http://{}", listener.local_addr()?),
            Bound::Unix(_, socket) => format!("unix:{}", socket.path.display()),
        })
    }
}
