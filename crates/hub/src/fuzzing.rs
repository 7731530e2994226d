//! All that is read of what a hub answers, as a function of bytes: for fuzzing.

use std::sync::OnceLock;
use std::time::Duration;

use ureq::Body;
use ureq::http::{HeaderMap, HeaderName, HeaderValue};

use crate::api;
use crate::client::{Answer, Client, Failure, location};
use crate::name::{Choice, is_relative};
use crate::quant;
use crate::selection;
use crate::settings::Settings;
use crate::transfer::{content_range, is_answer_to};
use crate::url::Url;

fn client() -> &'static Client {
    static CLIENT: OnceLock<Client> = OnceLock::new();
    CLIENT.get_or_init(|| {
        Client::new(Settings {
            endpoint: Url::parse("https://hub.example").expect("an URL"),
            token: None,
            cache: "cache".into(),
            offline: false,
            connections: 1,
            patience: Duration::from_secs(1),
            tries: 1,
            pause: Duration::ZERO,
        })
    })
}

/// Reads an answer: a status, lines of headers, an empty line, and a body that may be a list of files. Checks what the rest of the crate relies on.
#[doc(hidden)]
pub fn read_answer(bytes: &[u8]) {
    let split = bytes.windows(2).position(|two| two == b"\n\n");
    let (head, body) = split.map_or((bytes, &[][..]), |at| (&bytes[..at], &bytes[at + 2..]));
    let mut lines = head.split(|byte| *byte == b'\n');
    let status = lines.next().and_then(|line| std::str::from_utf8(line).ok()?.trim().parse().ok()).unwrap_or(302);
    let mut headers = HeaderMap::new();
    for line in lines {
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { continue };
        let name = HeaderName::from_bytes(&line[..colon]);
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) = (name, value) {
            headers.append(name, value);
        }
    }
    read_redirect(&headers, status);
    read_range(&headers);
    if let Some(facts) = api::facts_in(&headers, (300..400).contains(&status)) {
        assert!(facts.size <= api::MAX_SIZE && [40, 64].contains(&facts.digest.hex().len()));
    }
    read_refusal(&headers, status, body);
    read_list(body);
}

fn read_redirect(headers: &HeaderMap, status: u16) {
    let Some(to) = location(headers, status) else { return };
    for from in ["https://hub.example/org/name", "https://cdn.example/a?b", "http://hub.example"] {
        let from = Url::parse(from).expect("an URL");
        if let Ok(url) = client().redirected(&from, to) {
            assert!(from.scheme == "http" || url.scheme == "https", "{from} to {url}");
            assert_eq!(Url::parse(&url.to_string()).ok().as_ref(), Some(&url));
            // Whoever gets the token is the hub, however it is written.
            let host = url.authority.trim_end_matches(":443");
            assert_eq!(client().is_hub(&url), url.scheme == "https" && host == "hub.example", "{url}");
            assert!(!url.shown().contains('?'));
        }
    }
}

fn read_range(headers: &HeaderMap) {
    let Some(text) = headers.get("content-range").and_then(|value| value.to_str().ok()) else { return };
    let (begin, end, size) = (100, 200, 1000);
    if is_answer_to(content_range(text), begin, end, size) {
        let (first, last, all) = content_range(text).expect("an answer");
        assert!(first == begin && (first..end).contains(&last) && all.is_none_or(|all| all == size), "{text}");
    }
}

fn read_refusal(headers: &HeaderMap, status: u16, body: &[u8]) {
    let url = Url::parse("https://cdn.example/a?signature=secret").expect("an URL");
    let body = Body::builder().data(body.to_vec());
    let answer = Answer { status, headers: headers.clone(), body, url };
    let (Failure::Again(error, _) | Failure::Final(error)) = client().refused(answer, "org/name", "file");
    let said = error.to_string();
    assert!(!said.chars().any(char::is_control) && !said.contains("secret"), "{said:?}");
}

fn read_list(body: &[u8]) {
    let Ok(listing) = api::listing(body) else { return };
    assert!(listing.commit.len() == 40 && is_relative(&listing.commit));
    let files: Vec<&str> = listing.files.keys().map(String::as_str).collect();
    assert!(files.iter().all(|file| is_relative(file)));
    assert!(listing.files.values().flatten().all(|facts| facts.size <= api::MAX_SIZE));
    let labels = files.iter().filter_map(|file| Some(Choice::Quant(quant::read(file)?.label)));
    let named = files.iter().map(|file| Choice::File((*file).to_owned()));
    for choice in [Choice::Usual].into_iter().chain(labels.take(4)).chain(named.take(4)) {
        // The index of shards is a file of the hub's, too.
        let Ok(found) = selection::select(&files, &choice, &mut |_| Ok(body.to_vec())) else { continue };
        assert!(!found.weights.is_empty() || found.entry.is_some());
        assert!(found.small.iter().chain(&found.weights).chain(&found.entry).all(|file| files.contains(&&**file)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_to_the_end() {
        let digest = "a".repeat(64);
        let headers =
            format!("location: /b\ncontent-range: bytes 100-199/1000\nx-linked-etag: \"{digest}\"\nx-linked-size: 5");
        read_answer(format!("302\n{headers}\n\n").as_bytes());
        let list =
            format!(r#"{{"sha": "{}", "siblings": [{{"rfilename": "m-Q4_K_M.gguf", "size": 5}}]}}"#, "b".repeat(40));
        read_answer(format!("200\n\n{list}").as_bytes());
        assert!(api::listing(list.as_bytes()).is_ok());
        for size in [api::MAX_SIZE + 1, u64::MAX] {
            let large = list.replace("\"size\": 5", &format!("\"size\": {size}, \"blobId\": \"{}\"", "c".repeat(40)));
            assert!(api::listing(large.as_bytes()).is_err_and(|why| why.contains("m-Q4_K_M.gguf")));
        }
    }
}
