//! Replays a conversation with tools. Every request has all messages so far, as agents send them; the model's actual answers are not used. How much of known prompts the
//! server computes again shows how well its prefix cache works.

use anyhow::Result;
use clap::ValueEnum;
use fastrand::Rng;
use serde_json::{Value, json};

use super::client::{Client, StreamedAnswer};
use super::workload::{RequestTemplate, around, sentence};
use crate::terminal;

/// What happens to thoughts in earlier turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Thinking {
    /// They stay in the history.
    Kept,
    /// Thoughts before the user's last question are dropped, as templates of thinking models do.
    Stripped,
}

/// Why a request is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    Question,
    ToolResult,
    /// The same messages again.
    Regeneration,
    /// The last question is replaced by another.
    Edit,
}

impl RequestKind {
    fn name(self) -> &'static str {
        match self {
            RequestKind::Question => "question",
            RequestKind::ToolResult => "tool result",
            RequestKind::Regeneration => "regeneration",
            RequestKind::Edit => "edit",
        }
    }
}

struct Request {
    kind: RequestKind,
    messages: Vec<Value>,
}

/// Approximate number of words of each kind of message.
const SYSTEM: usize = 400;
const QUESTION: usize = 40;
const THOUGHT: usize = 40;
const CALL: usize = 12;
const RESULT: usize = 80;
const ANSWER: usize = 60;
/// Tool calls after each question.
const CALLS: usize = 2;
/// Fractions of the conversation after which there is a regeneration and an edit.
const REGENERATION: f64 = 0.4;
const EDIT: f64 = 0.7;
/// Tokens at the end of an earlier prompt that may change when more text follows.
const JOIN: usize = 8;

/// A message of the model: its thought and its text.
struct Said {
    thought: String,
    text: String,
}

/// The requests of a conversation of this many turns, including one regeneration and one edit.
fn requests(seed: u64, turns: usize, thinking: Thinking) -> Vec<Request> {
    let mut rng = Rng::with_seed(seed);
    let mut text = |mean: usize| {
        let words = around(&mut rng, mean);
        sentence(&mut rng, words)
    };
    let (mut history, mut made) = (vec![Entry::Other("system", text(SYSTEM))], Vec::new());
    let [again, differently] = [REGENERATION, EDIT].map(|part| (part * turns as f64) as usize);
    let (mut calls, mut regenerated, mut edited) = (CALLS, false, false);
    while made.len() < turns {
        let (kind, entry) = if made.len() > again && !regenerated {
            regenerated = true;
            (RequestKind::Regeneration, None)
        } else if made.len() > differently && !edited {
            edited = true;
            let asked = history.iter().rposition(|e| matches!(e, Entry::Other("user", _)));
            history.truncate(asked.expect("the first request asks"));
            calls = 0;
            (RequestKind::Edit, Some(Entry::Other("user", text(QUESTION))))
        } else if calls < CALLS {
            let call = format!("<tool_call>{}</tool_call>", json!({"name": "search", "arguments": text(CALL)}));
            history.push(Entry::Model(Said { thought: text(THOUGHT), text: call }));
            calls += 1;
            (RequestKind::ToolResult, Some(Entry::Other("tool", text(RESULT))))
        } else {
            if !made.is_empty() {
                history.push(Entry::Model(Said { thought: text(THOUGHT), text: text(ANSWER) }));
            }
            calls = 0;
            (RequestKind::Question, Some(Entry::Other("user", text(QUESTION))))
        };
        history.extend(entry);
        made.push(Request { kind, messages: messages(&history, thinking) });
    }
    made
}

enum Entry {
    Other(&'static str, String),
    Model(Said),
}

fn messages(history: &[Entry], thinking: Thinking) -> Vec<Value> {
    let last_question = history.iter().rposition(|e| matches!(e, Entry::Other("user", _))).unwrap_or(0);
    let one = |(i, entry): (usize, &Entry)| match entry {
        Entry::Other(role, text) => json!({"role": role, "content": text}),
        Entry::Model(said) if thinking == Thinking::Kept || i > last_question => {
            json!({"role": "assistant", "content": format!("<think>\n{}\n</think>\n\n{}", said.thought, said.text)})
        }
        Entry::Model(said) => json!({"role": "assistant", "content": said.text}),
    };
    history.iter().enumerate().map(one).collect()
}

/// Measurements of one request.
struct Turn {
    kind: RequestKind,
    answer: StreamedAnswer,
    /// Tokens of the prompt, and how many of them were computed; `None` if the server does not say.
    prompt: usize,
    recomputed: Option<usize>,
    /// How many tokens the prompt adds to the longest earlier prompt that it continues.
    last_turn: usize,
}

/// Replays a conversation. Fails if any request fails, since the later ones would show nothing.
pub async fn run(client: &Client, template: &RequestTemplate, turns: usize, thinking: Thinking) -> Result<Value> {
    let mut before: Vec<(Vec<Value>, usize)> = Vec::new();
    let mut done = Vec::new();
    for Request { kind, messages } in requests(template.seed, turns, thinking) {
        let mut body = template.body(template.output);
        body["messages"] = json!(messages);
        let answer = client.stream("/v1/chat/completions", body, |_| {}).await?;
        let prompt = answer.prompt_tokens.unwrap_or(0);
        let goes_on = |(old, _): &&(Vec<Value>, usize)| old.len() < messages.len() && messages.starts_with(old);
        let known = before.iter().filter(goes_on).map(|(_, tokens)| *tokens).max().unwrap_or(0);
        let recomputed = answer.cached_tokens.map(|cached| prompt.saturating_sub(cached));
        done.push(Turn { kind, answer, prompt, recomputed, last_turn: prompt.saturating_sub(known) });
        before.push((messages, prompt));
    }
    Ok(to_json(&done))
}

fn to_json(turns: &[Turn]) -> Value {
    let sum = |of: &dyn Fn(&Turn) -> Option<usize>| turns.iter().map(of).sum::<Option<usize>>();
    let row = |t: &Turn| {
        json!({
            "kind": t.kind.name(), "prompt_tokens": t.prompt, "recomputed_tokens": t.recomputed,
            "last_turn_tokens": t.last_turn, "ttft_ms": t.answer.ttft(),
        })
    };
    // The first prompt is all new.
    let beyond = |t: &Turn| t.recomputed.map(|n| usize::from(n > t.last_turn + JOIN));
    json!({
        "turns": turns.iter().map(row).collect::<Vec<_>>(),
        "prompt_tokens": sum(&|t| Some(t.prompt)),
        "recomputed_tokens": sum(&|t| t.recomputed),
        "last_turn_tokens": sum(&|t| Some(t.last_turn)),
        "turns_beyond_the_last": sum(&beyond),
        "ttft_ms_mean": turns.iter().map(|t| t.answer.ttft()).sum::<f64>() / turns.len() as f64,
    })
}

/// Prints a report as text.
pub fn print(report: &Value) {
    println!("{:>5}  {:<14}{:>10}{:>12}{:>11}{:>12}", "turn", "", "prompt", "recomputed", "last turn", "TTFT ms");
    for (i, turn) in report["turns"].as_array().into_iter().flatten().enumerate() {
        let count = |name: &str| turn[name].as_u64().map_or("-".to_owned(), |n| n.to_string());
        let ttft = turn["ttft_ms"].as_f64().unwrap_or(f64::NAN);
        println!(
            "{:>5}  {:<14}{:>10}{:>12}{:>11}{ttft:>12.1}",
            i + 1,
            turn["kind"].as_str().unwrap_or(""),
            count("prompt_tokens"),
            count("recomputed_tokens"),
            count("last_turn_tokens"),
        );
    }
    match (report["recomputed_tokens"].as_u64(), report["turns_beyond_the_last"].as_u64()) {
        (Some(recomputed), Some(beyond)) => println!(
            "{recomputed} of {} tokens recomputed, {} of them new; more than the last turn {beyond} times",
            report["prompt_tokens"], report["last_turn_tokens"]
        ),
        _ => terminal::note("the server does not report cached tokens (usage.prompt_tokens_details.cached_tokens)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_goes_on_but_where_it_is_asked_again() {
        for thinking in [Thinking::Kept, Thinking::Stripped] {
            let all = requests(5, 30, thinking);
            assert_eq!(all.len(), 30);
            assert_eq!(all.iter().filter(|r| r.kind == RequestKind::Regeneration).count(), 1);
            assert_eq!(all.iter().filter(|r| r.kind == RequestKind::Edit).count(), 1);
            for pair in all.windows(2) {
                let [old, new] = pair else { unreachable!() };
                let common = old.messages.iter().zip(&new.messages).take_while(|(a, b)| a == b).count();
                match new.kind {
                    RequestKind::Regeneration => assert_eq!(old.messages, new.messages),
                    RequestKind::Edit => {
                        assert!(common + 1 == new.messages.len() && new.messages[common]["role"] == "user")
                    }
                    RequestKind::Question if thinking == Thinking::Stripped => {
                        assert!(common < old.messages.len() && common > 0);
                    }
                    _ => assert_eq!(common, old.messages.len()),
                }
                assert!(matches!(new.messages.last().unwrap()["role"].as_str(), Some("user" | "tool")));
            }
        }
    }

    #[test]
    fn thoughts_before_the_last_question_are_left_out_where_they_are_stripped() {
        for (thinking, kept) in [(Thinking::Kept, true), (Thinking::Stripped, false)] {
            let last = requests(5, 30, thinking).into_iter().rfind(|r| r.kind == RequestKind::Question).unwrap();
            let said = last.messages.iter().filter(|m| m["role"] == "assistant");
            assert!(said.clone().count() > 0);
            assert!(said.clone().all(|m| m["content"].as_str().unwrap().contains("<think>") == kept), "{thinking:?}");
        }
    }
}
