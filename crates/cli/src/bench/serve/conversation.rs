//! A conversation with tools, replayed: every request has all messages so far, as agents send them, and what the model answers is not what comes next. What a
//! server computes of each prompt that it has computed before shows what its prefix cache is worth.

use anyhow::Result;
use clap::ValueEnum;
use fastrand::Rng;
use serde_json::{Value, json};

use super::Plan;
use super::client::{Answer, Client};
use super::workload::{around, sentence};
use crate::terminal;

/// What becomes of the model's thoughts in earlier turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Thinking {
    /// They stay in the history.
    Kept,
    /// Those before the last question of the user are left out, as templates of thinking models do.
    Stripped,
}

/// Why a request is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Question,
    ToolResult,
    /// The same again.
    Regeneration,
    /// The last question was another one.
    Edit,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Question => "question",
            Kind::ToolResult => "tool result",
            Kind::Regeneration => "regeneration",
            Kind::Edit => "edit",
        }
    }
}

struct Request {
    kind: Kind,
    messages: Vec<Value>,
}

/// Words of each message, about.
const SYSTEM: usize = 400;
const QUESTION: usize = 40;
const THOUGHT: usize = 40;
const CALL: usize = 12;
const RESULT: usize = 80;
const ANSWER: usize = 60;
/// Calls of tools behind each question.
const CALLS: usize = 2;
/// Parts of the conversation after which something is asked for again, and asked differently.
const REGENERATION: f64 = 0.4;
const EDIT: f64 = 0.7;
/// Tokens at the end of an earlier prompt that may be other ones once a text stands behind it.
const JOIN: usize = 8;

/// One of the model's messages: its thought, and what it says.
struct Said {
    thought: String,
    text: String,
}

/// The requests of a conversation of so many turns; a regeneration and an edit are two of them.
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
            (Kind::Regeneration, None)
        } else if made.len() > differently && !edited {
            edited = true;
            let asked = history.iter().rposition(|e| matches!(e, Entry::Other("user", _)));
            history.truncate(asked.expect("the first request asks"));
            calls = 0;
            (Kind::Edit, Some(Entry::Other("user", text(QUESTION))))
        } else if calls < CALLS {
            let call = format!("<tool_call>{}</tool_call>", json!({"name": "search", "arguments": text(CALL)}));
            history.push(Entry::Model(Said { thought: text(THOUGHT), text: call }));
            calls += 1;
            (Kind::ToolResult, Some(Entry::Other("tool", text(RESULT))))
        } else {
            if !made.is_empty() {
                history.push(Entry::Model(Said { thought: text(THOUGHT), text: text(ANSWER) }));
            }
            calls = 0;
            (Kind::Question, Some(Entry::Other("user", text(QUESTION))))
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

/// What came of a request.
struct Turn {
    kind: Kind,
    answer: Answer,
    /// Tokens of the prompt, and those of them that were computed; `None` where the server does not say.
    prompt: usize,
    recomputed: Option<usize>,
    /// Tokens that the prompt has more than the longest earlier one that it goes on from: its last turn.
    last_turn: usize,
}

/// Replays a conversation; `Err` where a request fails, since those after it would show nothing.
pub async fn run(client: &Client, plan: &Plan, turns: usize, thinking: Thinking) -> Result<Value> {
    let mut before: Vec<(Vec<Value>, usize)> = Vec::new();
    let mut done = Vec::new();
    for Request { kind, messages } in requests(plan.seed, turns, thinking) {
        let mut body = plan.body(plan.output);
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
    // The first prompt is new, all of it.
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
        _ => {
            terminal::note("the server does not say how many tokens it had (usage.prompt_tokens_details.cached_tokens)")
        }
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
            assert_eq!(all.iter().filter(|r| r.kind == Kind::Regeneration).count(), 1);
            assert_eq!(all.iter().filter(|r| r.kind == Kind::Edit).count(), 1);
            for pair in all.windows(2) {
                let [old, new] = pair else { unreachable!() };
                let common = old.messages.iter().zip(&new.messages).take_while(|(a, b)| a == b).count();
                match new.kind {
                    Kind::Regeneration => assert_eq!(old.messages, new.messages),
                    Kind::Edit => assert!(common + 1 == new.messages.len() && new.messages[common]["role"] == "user"),
                    Kind::Question if thinking == Thinking::Stripped => {
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
            let last = requests(5, 30, thinking).into_iter().rfind(|r| r.kind == Kind::Question).unwrap();
            let said = last.messages.iter().filter(|m| m["role"] == "assistant");
            assert!(said.clone().count() > 0);
            assert!(said.clone().all(|m| m["content"].as_str().unwrap().contains("<think>") == kept), "{thinking:?}");
        }
    }
}
