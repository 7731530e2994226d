//! The server of an agent: the one that answers on a port, or one of our own, which ends with this process, whatever ends it.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::folders;

/// A server that is asked for its models answers at once.
const PATIENCE: Duration = Duration::from_secs(10);
/// The most bytes of an answer.
const MOST: u64 = 4 << 20;
/// Between two questions while a model is loaded.
const POLL: Duration = Duration::from_millis(50);
/// A server of ours gets so long to end by itself.
const GRACE: Duration = Duration::from_secs(10);

/// A model that a server has.
#[derive(Clone, Debug, PartialEq)]
pub struct Served {
    pub name: String,
    /// The context in tokens.
    pub context: Option<u64>,
}

impl Served {
    /// A model that no server has told about.
    pub fn named(model: Option<&Path>) -> Served {
        // With one model, a server takes any name.
        Served { name: model.map_or("local".to_owned(), |model| model.display().to_string()), context: None }
    }
}

/// What is at a port.
#[derive(Debug)]
pub enum Answer {
    Nobody,
    /// A server that loads its model.
    Loading,
    /// A server of ours that is ready; the model in memory first.
    Models(Vec<Served>),
    WantsKey,
    /// Something else.
    Another,
}

/// The key of servers that want one.
pub fn key() -> Option<String> {
    std::env::var("SLUICE_API_KEY").ok().filter(|key| !key.is_empty() && key.bytes().all(|b| b.is_ascii_graphic()))
}

/// Asks who is at a port.
///
/// # Errors
/// A connection that breaks off.
pub fn ask(port: u16, key: Option<&str>) -> Result<Answer> {
    let stream = match TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
        Ok(stream) => stream,
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => return Ok(Answer::Nobody),
        Err(e) => return Err(e).with_context(|| format!("port {port}")),
    };
    let Ok(text) = get(stream, "/v1/models", key) else { return Ok(Answer::Another) };
    Ok(answer(&text))
}

/// Whole answer to a GET. In HTTP/1.0 it ends with the connection, and has no chunks.
fn get(mut stream: TcpStream, path: &str, key: Option<&str>) -> io::Result<String> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let key = key.map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: 127.0.0.1\r\nUser-Agent: sluice-launch\r\n{key}\r\n")?;
    let mut bytes = Vec::new();
    stream.take(MOST).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn answer(text: &str) -> Answer {
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
    let status = head.split_ascii_whitespace().nth(1).and_then(|status| status.parse::<u16>().ok());
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    match status {
        Some(200) => {
            let models = body["data"].as_array().map(Vec::as_slice).unwrap_or_default();
            let is_ours = !models.is_empty() && models.iter().all(|model| model["owned_by"] == "sluice");
            let one = |model: &Value| {
                Some(Served { name: model["id"].as_str()?.to_owned(), context: model["max_model_len"].as_u64() })
            };
            if is_ours { Answer::Models(models.iter().filter_map(one).collect()) } else { Answer::Another }
        }
        Some(401) => Answer::WantsKey,
        Some(503) if body.to_string().to_lowercase().contains("loading") => Answer::Loading,
        _ => Answer::Another,
    }
}

/// Waits until the server is ready.
///
/// # Errors
/// A server that ends before, with its last message.
pub fn wait(port: u16, key: Option<&str>, own: Option<&Own>) -> Result<Vec<Served>> {
    loop {
        if let Some(own) = own {
            own.check()?;
        }
        match ask(port, key)? {
            Answer::Models(models) => return Ok(models),
            Answer::Loading => {}
            Answer::Nobody if own.is_some() => {}
            Answer::WantsKey => bail!("the server wants another key than SLUICE_API_KEY has"),
            Answer::Nobody | Answer::Another => {
                bail!("the server on port {port} has ended, or another program has taken the port")
            }
        }
        sleep(POLL);
    }
}

/// A server that was started here. It ends when this is dropped, and when this process ends.
pub struct Own {
    child: Mutex<Child>,
    log: PathBuf,
}

impl Own {
    /// Starts one. `flags`: more flags, with spaces between them.
    pub fn start(model: &Path, port: u16, flags: &str, config: Option<&Path>) -> Result<Own> {
        let folder = folders::logs().context("there is no home folder for the server's messages")?;
        let log = folder.join(format!("launch-{port}.log"));
        let messages = File::create(&log).with_context(|| log.display().to_string())?;
        let mut command = Command::new(std::env::current_exe().context("cannot find this program's file")?);
        command.arg("serve").arg(model).args(["--host", "127.0.0.1", "--port"]).arg(port.to_string());
        command.arg("--until-input-ends").args(flags.split_ascii_whitespace());
        if let Some(config) = config {
            command.arg("--config").arg(config);
        }
        // In a group of its own: Ctrl-C in the agent is not meant for it.
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(messages).process_group(0);
        let child = command.spawn().context("cannot start the server")?;
        Ok(Own { child: Mutex::new(child), log })
    }

    /// Where its messages are.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// An error if it has ended.
    fn check(&self) -> Result<()> {
        let mut child = self.child.lock().unwrap_or_else(|e| e.into_inner());
        if child.try_wait()?.is_none() {
            return Ok(());
        }
        let said = fs::read_to_string(&self.log).unwrap_or_default();
        let begins = |with: &'static str| said.lines().rev().find_map(|line| line.strip_prefix(with));
        let why = begins("sluice: ").or_else(|| begins("error: ")).unwrap_or("it said nothing");
        bail!("the server did not start: {why}")
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(|e| e.into_inner());
        // The end of its input asks it to stop.
        drop(child.stdin.take());
        let until = Instant::now() + GRACE;
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
            sleep(POLL);
        }
        let _ = child.kill();
        let _ = child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_answers_is_told_by_the_answer() {
        let with = |status: &str, body: &str| {
            answer(&format!("HTTP/1.0 {status}\r\ncontent-type: application/json\r\n\r\n{body}"))
        };
        let ours = r#"{"data": [{"id": "m", "owned_by": "sluice", "max_model_len": 4096}]}"#;
        assert!(
            matches!(with("200 OK", ours), Answer::Models(models) if models == [Served { name: "m".into(), context: Some(4096) }])
        );
        assert!(matches!(with("200 OK", r#"{"data": [{"id": "m", "owned_by": "llamacpp"}]}"#), Answer::Another));
        assert!(matches!(with("200 OK", "<html>"), Answer::Another));
        assert!(matches!(with("401 Unauthorized", "{}"), Answer::WantsKey));
        assert!(matches!(
            with("503 Service Unavailable", r#"{"error": {"message": "the model is still loading"}}"#),
            Answer::Loading
        ));
        assert!(matches!(answer("SSH-2.0-OpenSSH_9.2\r\n"), Answer::Another));
    }
}
