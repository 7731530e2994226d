//! Drafts in a server: the answers are those without them, a prediction is drafted from, and counts say what came of it.

use crate::support;

use serde_json::{Value, json};
use support::server::Server;

const STORY: &str = "Tell me a story about a fox and a crow.";

fn chat(more: &Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 120, "temperature": 0, "seed": 5, "ignore_eos": true, "logprobs": true, "top_logprobs": 2,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn a_prediction_makes_no_difference_but_in_counts() {
    let Some(plain) = Server::start(&["--max-context", "1024", "--draft", "off"]) else { return };
    let drafting = Server::start(&["--max-context", "1024"]).unwrap();
    let (status, wanted) = plain.post("/v1/chat/completions", &chat(&json!({})));
    assert_eq!(status, 200, "{wanted}");
    let text = wanted["choices"][0]["message"]["content"].as_str().unwrap();
    let prediction = json!({"prediction": {"type": "content", "content": [{"type": "text", "text": text}]}});
    // 1. The same answer, sooner or not
    let (status, found) = drafting.post("/v1/chat/completions", &chat(&prediction));
    assert_eq!((status, &found["choices"]), (200, &wanted["choices"]));
    assert_eq!(found["usage"]["completion_tokens"], wanted["usage"]["completion_tokens"]);
    let counts = &found["usage"]["completion_tokens_details"];
    let [accepted, rejected] =
        ["accepted_prediction_tokens", "rejected_prediction_tokens"].map(|name| counts[name].as_u64().unwrap());
    assert!(wanted["usage"].get("completion_tokens_details").is_none(), "{wanted}");
    // 2. The metrics say the same
    let metric = |name: &str| drafting.metric(&format!("vllm:spec_decode_num_{name}_total")) as u64;
    drafting.wait_until("the metrics of an answer", |_| {
        (metric("accepted_tokens"), metric("draft_tokens")) == (accepted, accepted + rejected)
    });
    assert!(metric("drafts") <= metric("draft_tokens"));
    // 3. Without drafts the field has no effect, and is named; what it may not be is refused
    let (status, headers, _) = plain.post_with("/v1/chat/completions", &[], &chat(&prediction));
    assert_eq!((status, headers["sluice-ignored"].to_str().unwrap()), (200, "prediction"));
    for wrong in
        [json!({"type": "image"}), json!({"type": "content"}), json!({"content": [{"type": "text"}]}), json!(3)]
    {
        let (status, answer) = plain.post("/v1/chat/completions", &chat(&json!({"prediction": wrong})));
        assert!(status == 400 && answer["error"]["param"] == "prediction", "{wrong}: {status} {answer}");
    }
}
