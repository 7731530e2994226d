//! The server: a process on a free port, with a bucket in a folder.

use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use std::{env, fs};

pub const KEY: &str = "AKIDTESTTESTTEST";
pub const SECRET: &str = "a-secret-of-the-test";

pub struct Server {
    program: PathBuf,
    root: tempfile::TempDir,
    port: u16,
    process: Child,
}

impl Server {
    /// `None`: the program is not here, which is said.
    pub fn start() -> Option<Server> {
        let named = env::var_os("SLUICE_S3_SERVER").map(PathBuf::from);
        let on_path = || env::split_paths(&env::var_os("PATH")?).map(|p| p.join("s3s-fs")).find(|p| p.is_file());
        let Some(program) = named.or_else(on_path) else {
            eprintln!("SKIPPED: there is no S3-compatible server: cargo install s3s-fs@0.14.1 --features binary");
            return None;
        };
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("bucket")).unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let process = run(&program, &root, port);
        Some(Server { program, root, port, process })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Removes all objects.
    pub fn clear(&self) {
        let bucket = self.root.path().join("bucket");
        fs::remove_dir_all(&bucket).unwrap();
        fs::create_dir(bucket).unwrap();
    }

    pub fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub fn restart(&mut self) {
        self.process = run(&self.program, &self.root, self.port);
    }
}

fn run(program: &PathBuf, root: &tempfile::TempDir, port: u16) -> Child {
    let port_text = port.to_string();
    let args = ["--host", "127.0.0.1", "--port", &port_text, "--access-key", KEY, "--secret-key", SECRET];
    let process = Command::new(program).args(args).arg(root.path()).stdout(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        assert!(Instant::now() < until, "the server does not listen");
        thread::sleep(Duration::from_millis(10));
    }
    process
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
