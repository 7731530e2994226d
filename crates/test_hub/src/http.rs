//! As much of HTTP/1.1 as a hub needs.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;

/// A request as it arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// `GET` or `HEAD`; `CONNECT` of a proxy.
    pub method: String,
    /// Path and query.
    pub path: String,
    /// The `Authorization` header.
    pub authorization: Option<String>,
    /// First and last byte.
    pub range: Option<(u64, u64)>,
    /// It came to the server that has the bytes, not to the hub.
    pub is_for_bytes: bool,
}

/// The next request of a connection; `None` at its end.
pub fn read(stream: &mut BufReader<TcpStream>, is_for_bytes: bool) -> io::Result<Option<Request>> {
    let mut line = String::new();
    if stream.take(65536).read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace();
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let mut request =
        Request { method: method.to_owned(), path: target.to_owned(), authorization: None, range: None, is_for_bytes };
    loop {
        let mut header = String::new();
        stream.take(65536).read_line(&mut header)?;
        let Some((name, value)) = header.trim_end().split_once(':') else { return Ok(Some(request)) };
        match name.to_ascii_lowercase().as_str() {
            "authorization" => request.authorization = Some(value.trim().to_owned()),
            "range" => {
                let parts = value.trim().strip_prefix("bytes=").and_then(|range| range.split_once('-'));
                request.range = parts.and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
            }
            _ => {}
        }
    }
}

/// Writes the head of an answer.
pub fn head(stream: &mut TcpStream, status: u16, headers: &[(String, String)], length: u64) -> io::Result<()> {
    let mut text = format!("HTTP/1.1 {status} Status\r\ncontent-length: {length}\r\n");
    headers.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
    stream.write_all(format!("{text}\r\n").as_bytes())
}
