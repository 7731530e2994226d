//! How families write thoughts and calls, and a small template of each that does with them what the published one does.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use sluice_engine::text::{Calls, DsmlBlock, ModelText};

use crate::answers::drawn::python;
use crate::harmony;

/// Tools, users and results; `BEGIN` ends prompts, and `ASSISTANT` writes an answer and its end.
const FRAME: &str = "{%- set ns = namespace(last=-1) %}\
    {%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\
    {%- if tools %}{{- '<|im_start|>system\\n' }}{%- for t in tools %}{{- (t | tojson) ~ '\\n' }}{%- endfor %}{{- 'EXAMPLE<|im_end|>\\n' }}{%- endif %}\
    {%- for m in messages %}\
    {%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}{%- set keeps = m.reasoning_content and loop.index0 > ns.last %}ASSISTANT{{- '<|im_end|>\\n' }}\
    {%- else %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- endif %}\
    {%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nBEGIN' }}{%- endif %}";

/// A family's form.
pub struct Form {
    pub name: &'static str,
    pub calls: Calls,
    /// What its prompts end with, and what stands around thoughts.
    begin: &'static str,
    thought: [&'static str; 2],
    /// Thoughts of earlier turns stay.
    pub keeps: bool,
    /// A text may stand before calls.
    pub says: bool,
    /// The part of the template that writes an answer.
    assistant: &'static str,
}

const PLAIN: Form =
    Form { name: "", calls: Calls::Json, begin: "", thought: ["", ""], keeps: false, says: true, assistant: "" };
const THINK: [&str; 2] = ["<think>\n", "\n</think>\n\n"];

pub const FORMS: [Form; 17] = [
    Form {
        name: "Qwen3",
        thought: THINK,
        assistant: "{%- if keeps %}{{- '<think>\\n' ~ m.reasoning_content.strip('\\n') ~ '\\n</think>\\n\\n' }}{%- endif %}{{- m.content }}\
            {%- for c in m.tool_calls or [] %}{{- '\\n' if not loop.first or m.content else '' }}\
            {{- '<tool_call>\\n{\"name\": \"' ~ c.function.name ~ '\", \"arguments\": ' ~ (c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) ~ '}\\n</tool_call>' }}{%- endfor %}",
        ..PLAIN
    },
    Form {
        name: "Qwen3.5",
        calls: Calls::Xml,
        begin: "<think>\\n",
        thought: THINK,
        assistant: "{%- if loop.index0 > ns.last %}{{- '<think>\\n' ~ (m.reasoning_content or '') | trim ~ '\\n</think>\\n\\n' }}{%- endif %}{{- m.content | trim }}\
            {%- for c in m.tool_calls or [] %}{{- '\\n' if not loop.first else '\\n\\n' if m.content else '' }}{{- '<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}\
            {%- for k, v in c.function.arguments | items %}{{- '<parameter=' ~ k ~ '>\\n' ~ (v if v is string else v | tojson) ~ '\\n</parameter>\\n' }}{%- endfor %}\
            {{- '</function>\\n</tool_call>' }}{%- endfor %}",
        ..PLAIN
    },
    // A line end follows each call, and one line end a thought.
    Form {
        name: "Nemotron 3",
        calls: Calls::Xml,
        begin: "<think>\\n",
        thought: ["<think>\n", "\n</think>\n"],
        assistant: "{%- set said = ('<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n' if keeps else '<think></think>') ~ m.content %}\
            {{- said | trim }}{%- if m.tool_calls %}{{- '\\n' }}{%- endif %}\
            {%- for c in m.tool_calls or [] %}{{- '<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}\
            {%- for k, v in c.function.arguments | items %}{{- '<parameter=' ~ k ~ '>\\n' ~ (v if v is string else v | tojson) ~ '\\n</parameter>\\n' }}{%- endfor %}\
            {{- '</function>\\n</tool_call>\\n' }}{%- endfor %}",
        ..PLAIN
    },
    Form {
        name: "GLM-4.6",
        calls: Calls::Keys,
        thought: ["\n<think>", "</think>\n"],
        assistant: "{{- '\\n<think>' ~ (m.reasoning_content.strip() if keeps else '') ~ '</think>' }}{%- if m.content.strip() %}{{- '\\n' ~ m.content.strip() }}{%- endif %}\
            {%- for c in m.tool_calls or [] %}{{- '\\n<tool_call>' ~ c.function.name ~ '\\n' }}\
            {%- for k, v in c.function.arguments.items() %}{{- '<arg_key>' ~ k ~ '</arg_key>\\n<arg_value>' ~ (v if v is string else v | tojson) ~ '</arg_value>\\n' }}{%- endfor %}\
            {{- '</tool_call>' }}{%- endfor %}",
        ..PLAIN
    },
    Form {
        name: "GLM-4.7",
        calls: Calls::Keys,
        begin: "<think>",
        thought: ["<think>", "</think>"],
        assistant: "{{- '<think>' ~ m.reasoning_content.strip() ~ '</think>' if keeps else '</think>' }}{{- m.content.strip() }}\
            {%- for c in m.tool_calls or [] %}{{- '<tool_call>' ~ c.function.name }}\
            {%- for k, v in c.function.arguments.items() %}{{- '<arg_key>' ~ k ~ '</arg_key><arg_value>' ~ (v if v is string else v | tojson) ~ '</arg_value>' }}{%- endfor %}\
            {{- '</tool_call>' }}{%- endfor %}",
        ..PLAIN
    },
    // A line end stands before calls, also where no text does.
    Form {
        name: "MiniMax-M2",
        calls: Calls::Invokes,
        begin: "<think>\\n",
        thought: THINK,
        assistant: "{%- if keeps %}{{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{%- endif %}{{- m.content }}\
            {%- if m.tool_calls %}{{- '\\n<minimax:tool_call>\\n' }}{%- for c in m.tool_calls %}{{- '<invoke name=\"' ~ c.function.name ~ '\">\\n' }}\
            {%- for k, v in c.function.arguments.items() %}{{- '<parameter name=\"' ~ k ~ '\">' ~ (v if v is string else v | tojson) ~ '</parameter>\\n' }}{%- endfor %}\
            {{- '</invoke>\\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}{%- endif %}",
        ..PLAIN
    },
    // Thoughts are parts of a message's content, and none is dropped.
    Form {
        name: "Ministral 3",
        calls: Calls::Mistral,
        thought: ["[THINK]", "[/THINK]"],
        keeps: true,
        assistant: "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for part in m.content %}\
            {%- if part.type == 'thinking' %}{{- '[THINK]' + part.thinking + '[/THINK]' }}{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}\
            {%- for c in m.tool_calls or [] %}{{- '[TOOL_CALLS]' ~ c.function.name ~ '[ARGS]' ~ (c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) }}{%- endfor %}",
        ..PLAIN
    },
    Form {
        name: "Mistral 7B",
        calls: Calls::Mistral,
        keeps: true,
        assistant: "{{- m.content }}{%- if m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for c in m.tool_calls %}\
            {%- if c.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}\
            {{- '{\"name\": \"' ~ c.function.name ~ '\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}' ~ (']' if loop.last else ', ') }}{%- endfor %}{%- endif %}",
        ..PLAIN
    },
    Form {
        name: "Phi-4-mini",
        calls: Calls::List,
        keeps: true,
        assistant: "{{- m.content }}{%- if m.tool_calls %}{{- '<|tool_call|>[' }}{%- for c in m.tool_calls %}\
            {{- '{\"name\": \"' ~ c.function.name ~ '\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}' ~ (']' if loop.last else ', ') }}{%- endfor %}\
            {{- '<|/tool_call|>' }}{%- endif %}",
        ..PLAIN
    },
    // Its template explains tools, and writes no calls.
    Form { name: "Granite 3", calls: Calls::List, keeps: true, assistant: "{{- m.content }}", ..PLAIN },
    Form {
        name: "DeepSeek-V3.1",
        calls: Calls::DeepSeek,
        begin: "</think>",
        keeps: true,
        assistant: "{{- '</think>' ~ m.content }}{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}\
            {{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{%- endfor %}\
            {{- '<｜tool▁calls▁end｜>' }}{%- endif %}",
        ..PLAIN
    },
    Form {
        name: "DeepSeek-R1",
        calls: Calls::DeepSeek,
        thought: ["<think>\n", "\n</think>\n\n"],
        assistant: "{%- if keeps %}{{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{%- endif %}{{- m.content }}\
            {%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}{{- '\\n' if not loop.first else '' }}\
            {{- '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}\
            {{- '<｜tool▁calls▁end｜>' }}{%- endif %}",
        ..PLAIN
    },
    // The templates of these three are those that checkpoints get which have none.
    Form { name: "deepseek_v32", calls: Calls::Dsml(DsmlBlock::Functions), thought: ["<think>", "</think>"], ..PLAIN },
    Form {
        name: "deepseek_v4",
        calls: Calls::Dsml(DsmlBlock::Tools),
        thought: ["<think>", "</think>"],
        keeps: true,
        ..PLAIN
    },
    Form {
        name: "kimi_k3",
        calls: Calls::Xtml,
        thought: ["<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"],
        keeps: true,
        ..PLAIN
    },
    Form {
        name: "Kimi-K2",
        calls: Calls::Kimi,
        thought: ["<think>", "</think>"],
        assistant: "{{- '<think>' ~ (m.reasoning_content if keeps else '') ~ '</think>' ~ m.content }}{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}\
            {%- for c in m.tool_calls %}{{- '<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' }}\
            {{- (c.function.arguments if c.function.arguments is string else c.function.arguments | tojson) ~ '<|tool_call_end|>' }}{%- endfor %}\
            {{- '<|tool_calls_section_end|>' }}{%- endif %}",
        ..PLAIN
    },
    Form {
        name: "gpt-oss",
        calls: Calls::Harmony,
        thought: ["<|channel|>analysis<|message|>", "<|end|><|start|>assistant"],
        ..PLAIN
    },
];

/// Gemma 4: what tools answer, and what follows, are in one turn of the model; a thought is kept before calls.
pub const GEMMA: Form = Form {
    name: "Gemma 4",
    calls: Calls::Gemma,
    thought: ["<|channel>thought\n", "\n<channel|>"],
    says: false,
    assistant: "{%- macro notation(v) %}{{- '<|\"|>' ~ v ~ '<|\"|>' if v is string else v }}{%- endmacro %}\
        {%- set ns = namespace(last=-1, open=false) %}\
        {%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\
        {%- if tools %}{{- '<|turn>system\\n' ~ (tools | tojson) ~ '<turn|>\\n' }}{%- endif %}\
        {%- for m in messages %}{%- if not ns.open %}{{- '<|turn>' ~ ('model' if m.role == 'assistant' else m.role) ~ '\\n' }}{%- endif %}\
        {%- if m.reasoning_content and m.tool_calls and loop.index0 > ns.last %}{{- '<|channel>thought\\n' ~ m.reasoning_content ~ '\\n<channel|>' }}{%- endif %}\
        {%- for c in m.tool_calls or [] %}{{- '<|tool_call>call:' ~ c.function.name ~ '{' }}\
        {%- if c.function.arguments is string %}{{- c.function.arguments }}{%- else %}{%- for k, v in c.function.arguments | dictsort %}{{- k ~ ':' ~ notation(v) ~ (',' if not loop.last else '') }}{%- endfor %}{%- endif %}\
        {{- '}<tool_call|>' }}{%- endfor %}\
        {%- for r in m.tool_responses or [] %}{{- '<|tool_response>response:' ~ r.name ~ '{value:' ~ notation(r.response) ~ '}<tool_response|>' }}{%- endfor %}\
        {{- m.content }}{%- set ns.open = m.tool_responses and not m.content %}\
        {%- if not ns.open %}{{- '<|tool_response>' if m.tool_calls and not m.tool_responses else '<turn|>\\n' }}{%- endif %}{%- endfor %}\
        {%- if add_generation_prompt and not ns.open %}{{- '<|turn>model\\n' }}{%- endif %}",
    ..PLAIN
};

/// What an answer says: a thought, a text, and calls with their arguments.
pub struct Answer<'a> {
    pub thought: &'a str,
    pub content: &'a str,
    pub calls: Vec<(&'a str, Value)>,
    /// Calls of the conversation before it.
    pub before: usize,
}

impl Form {
    fn template(&self) -> String {
        match self.calls {
            Calls::Gemma => self.assistant.to_owned(),
            Calls::Harmony => harmony::TEMPLATE.to_owned(),
            calls => {
                let example = match calls {
                    Calls::Json => "<tool_call>",
                    Calls::Xml => "<tool_call>\\n<function=f>",
                    Calls::List => "<|tool_call|>",
                    _ => "",
                };
                // GLM's answers begin with the line end.
                let head = if self.name == "GLM-4.6" { "assistant" } else { "assistant\\n" };
                let frame = FRAME.replace("assistant\\n", head);
                frame.replace("ASSISTANT", self.assistant).replace("BEGIN", self.begin).replace("EXAMPLE", example)
            }
        }
    }

    /// The demo's tokenizer with the families' marks, and the template.
    pub fn text(&self) -> ModelText {
        let folder = tempfile::tempdir().unwrap();
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        fs::copy(demo.join("tokenizer.json"), folder.path().join("tokenizer.json")).unwrap();
        // Marks that the older way has not, or not this family.
        let without = match self.name {
            "Mistral 7B" => "[ARGS]",
            "Granite 3" => "<|/tool_call|>",
            _ => "",
        };
        let marks: Vec<&str> = MARKS.into_iter().filter(|mark| *mark != without).collect();
        let mut config = json!({"extra_special_tokens": marks});
        if matches!(self.calls, Calls::Dsml(_) | Calls::Xtml) {
            let own = json!({"model_type": self.name}).to_string();
            fs::write(folder.path().join("config.json"), own).unwrap();
        } else {
            config["chat_template"] = self.template().into();
        }
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        ModelText::load(folder.path(), None).unwrap()
    }

    /// Whether it thinks.
    pub fn thinks(&self) -> bool {
        !self.thought[1].is_empty()
    }

    /// What ends an answer.
    pub fn end(&self, has_calls: bool) -> &'static str {
        match (self.calls, has_calls) {
            (Calls::Dsml(_), _) => "<｜end▁of▁sentence｜>",
            (Calls::Xtml, _) => "<|end_of_msg|>",
            (Calls::Harmony, true) => "<|call|>",
            (Calls::Harmony, false) => "<|return|>",
            (Calls::Gemma, true) => "<|tool_response>",
            (Calls::Gemma, false) => "<turn|>",
            _ => "<|im_end|>",
        }
    }

    /// The text that the model writes.
    pub fn write(&self, answer: &Answer) -> String {
        let mut text = String::new();
        let [begin, mut end] = self.thought;
        if !end.is_empty() {
            let is_begun = !self.begin.is_empty() || matches!(self.calls, Calls::Dsml(_) | Calls::Xtml);
            text += if is_begun { "" } else { begin };
            // GLM's line end belongs to the text.
            end = if self.name == "GLM-4.6" && answer.content.is_empty() { "</think>" } else { end };
            text += answer.thought;
            text += end;
        }
        text += match (self.calls, answer.calls.is_empty()) {
            (Calls::Harmony, true) => "<|channel|>final<|message|>",
            (Calls::Harmony, false) if !answer.content.is_empty() => "<|channel|>commentary<|message|>",
            _ => "",
        };
        text += answer.content;
        if self.calls == Calls::Xtml && answer.calls.is_empty() {
            text += "<|close|>response<|sep|><|close|>message<|sep|>";
        }
        text + &self.calls(answer)
    }

    /// Its calls, and what is between the text and them.
    pub fn calls(&self, answer: &Answer) -> String {
        if answer.calls.is_empty() {
            return String::new();
        }
        let is_silent = answer.content.is_empty();
        let line = if is_silent { "" } else { "\n" };
        let plain = |value: &Value| value.as_str().map_or_else(|| python(value), str::to_owned);
        let call = |(name, arguments): &(&str, Value)| {
            format!("{{\"name\": \"{name}\", \"arguments\": {}}}", python(arguments))
        };
        let each = |one: &dyn Fn(&str, &Value) -> String, gap: &str| {
            answer.calls.iter().map(|(name, arguments)| one(name, arguments)).collect::<Vec<_>>().join(gap)
        };
        let values = |arguments: &Value, one: &dyn Fn(&str, &Value) -> String| -> String {
            arguments.as_object().unwrap().iter().map(|(name, value)| one(name, value)).collect()
        };
        let list = || format!("[{}]", answer.calls.iter().map(call).collect::<Vec<_>>().join(", "));
        match (self.calls, self.name) {
            (Calls::Json, _) => {
                line.to_owned()
                    + &each(&|name, a| format!("<tool_call>\n{}\n</tool_call>", call(&(name, a.clone()))), "\n")
            }
            (Calls::Xml, name) => {
                let value = |name: &str, v: &Value| format!("<parameter={name}>\n{}\n</parameter>\n", plain(v));
                let one = |name: &str, a: &Value| {
                    format!("<tool_call>\n<function={name}>\n{}</function>\n</tool_call>", values(a, &value))
                };
                match name {
                    "Nemotron 3" => format!("{line}{}\n", each(&one, "\n")),
                    _ => format!("{line}{line}{}", each(&one, "\n")),
                }
            }
            (Calls::Keys, "GLM-4.6") => {
                let value =
                    |name: &str, v: &Value| format!("<arg_key>{name}</arg_key>\n<arg_value>{}</arg_value>\n", plain(v));
                each(&|name, a| format!("\n<tool_call>{name}\n{}</tool_call>", values(a, &value)), "")
            }
            (Calls::Keys, _) => {
                let value =
                    |name: &str, v: &Value| format!("<arg_key>{name}</arg_key><arg_value>{}</arg_value>", plain(v));
                each(&|name, a| format!("<tool_call>{name}{}</tool_call>", values(a, &value)), "")
            }
            (Calls::Invokes, _) => {
                let value = |name: &str, v: &Value| format!("<parameter name=\"{name}\">{}</parameter>\n", plain(v));
                let one = |name: &str, a: &Value| format!("<invoke name=\"{name}\">\n{}</invoke>\n", values(a, &value));
                format!("\n<minimax:tool_call>\n{}</minimax:tool_call>", each(&one, ""))
            }
            (Calls::Mistral, "Mistral 7B") => format!("[TOOL_CALLS]{}", list()),
            (Calls::Mistral, _) => each(&|name, a| format!("[TOOL_CALLS]{name}[ARGS]{}", python(a)), ""),
            (Calls::List, "Granite 3") => format!("<|tool_call|>{}", list()),
            (Calls::List, _) => format!("<|tool_call|>{}<|/tool_call|>", list()),
            (Calls::DeepSeek, name) => {
                let inner = match name {
                    "DeepSeek-R1" => each(
                        &|name, a| {
                            let fenced = format!("function<｜tool▁sep｜>{name}\n```json\n{}\n```", python(a));
                            format!("<｜tool▁call▁begin｜>{fenced}<｜tool▁call▁end｜>")
                        },
                        "\n",
                    ),
                    _ => each(
                        &|name, a| format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{}<｜tool▁call▁end｜>", python(a)),
                        "",
                    ),
                };
                format!("<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>")
            }
            (Calls::Dsml(block), _) => {
                let value = |name: &str, v: &Value| {
                    let is_text = v.is_string();
                    format!(
                        "<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{}</｜DSML｜parameter>\n",
                        plain(v)
                    )
                };
                let is_older = block == DsmlBlock::Functions;
                let one = |name: &str, a: &Value| {
                    let empty = if is_older && a == &json!({}) { "\n" } else { "" };
                    format!("<｜DSML｜invoke name=\"{name}\">\n{}{empty}</｜DSML｜invoke>", values(a, &value))
                };
                let name = if is_older { "function_calls" } else { "tool_calls" };
                format!("\n\n<｜DSML｜{name}>\n{}\n</｜DSML｜{name}>", each(&one, "\n"))
            }
            (Calls::Kimi, _) => {
                let one = |(i, (name, a)): (usize, &(&str, Value))| {
                    let id = format!("functions.{name}:{}", answer.before + i);
                    format!("<|tool_call_begin|>{id}<|tool_call_argument_begin|>{}<|tool_call_end|>", python(a))
                };
                let calls: String = answer.calls.iter().enumerate().map(one).collect();
                format!("<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>")
            }
            (Calls::Xtml, _) => {
                let value = |name: &str, v: &Value| {
                    let kind = if v.is_string() { "string" } else { "number" };
                    format!(
                        "<|open|>argument key=\"{name}\" type=\"{kind}\"<|sep|>{}<|close|>argument<|sep|>",
                        plain(v)
                    )
                };
                let one = |(i, (name, a)): (usize, &(&str, Value))| {
                    let (index, inner) = (i + 1, values(a, &value));
                    format!("<|open|>call tool=\"{name}\" index=\"{index}\"<|sep|>{inner}<|close|>call<|sep|>")
                };
                let calls: String = answer.calls.iter().enumerate().map(one).collect();
                let tools = format!("<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>");
                format!("<|close|>response<|sep|>{tools}<|close|>message<|sep|>")
            }
            (Calls::Gemma, _) => {
                let value = |v: &Value| v.as_str().map_or_else(|| v.to_string(), |text| format!("<|\"|>{text}<|\"|>"));
                let fields = |a: &Value| {
                    let all: Vec<String> =
                        a.as_object().unwrap().iter().map(|(name, v)| format!("{name}:{}", value(v))).collect();
                    all.join(",")
                };
                each(&|name, a| format!("<|tool_call>call:{name}{{{}}}<tool_call|>", fields(a)), "")
            }
            (Calls::Harmony, _) => {
                let (name, arguments) = &answer.calls[0];
                let before = if is_silent { "" } else { "<|end|><|start|>assistant" };
                format!("{before}<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}")
            }
        }
    }
}

/// What is a token of its own in at least one family.
const MARKS: [&str; 52] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "[THINK]",
    "[/THINK]",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "｜DSML｜",
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    "<|tool_call_argument_begin|>",
    "<|open|>",
    "<|close|>",
    "<|sep|>",
    "<|end_of_msg|>",
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|turn>",
    "<turn|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
];
