//! What a model writes comes back as the same text: generated, taken apart, sent back by a client, rendered by the family's template.

pub mod drawn;

use std::path::Path;
use std::sync::{Arc, OnceLock};

use drawn::{Answer, answer, gemma_notation, has_notation, python, tools};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use sluice_engine::text::{
    AnswerParser, Calls, ChatTemplate, Dialogue, DsmlBlock, Opened, Piece, Style, Tokenizer, Tools,
};

fn tokenizer() -> &'static Tokenizer {
    static DEMO: OnceLock<Tokenizer> = OnceLock::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    DEMO.get_or_init(|| Tokenizer::load(&folder, None).unwrap())
}

/// The part of a template that all families share: tools in the system prompt, and messages of users, tools and the system. `ASSISTANT` stands for what writes an answer,
/// `BEGIN` for what precedes the next one.
const FRAME: &str = "{%- set ns = namespace(last=-1) %}\
    {%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}\
    {%- if tools %}{{- '<|im_start|>system\\n<tools>' }}{%- for t in tools %}{{- '\\n' ~ (t | tojson) }}{%- endfor %}{{- '\\n</tools>EXAMPLE<|im_end|>\\n' }}{%- endif %}\
    {%- for m in messages %}\
    {%- if m.role == 'assistant' %}{{- '<|im_start|>assistant' }}ASSISTANT{{- '<|im_end|>\\n' }}\
    {%- elif m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' ~ m.content ~ '\\n</tool_response><|im_end|>\\n' }}\
    {%- else %}{{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{%- endif %}\
    {%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\nBEGIN' }}{%- endif %}";

/// A family: its template's part for answers, whether it thinks, and what its prompts end with.
struct Family {
    name: &'static str,
    calls: Calls,
    thinks: bool,
    begin: &'static str,
    assistant: &'static str,
}

const FAMILIES: [Family; 13] = [
    // Arguments always as JSON.
    Family {
        name: "Qwen2.5",
        calls: Calls::Json,
        thinks: false,
        begin: "",
        assistant: "{{- '\\n' }}{%- if m.content %}{{- m.content }}{%- endif %}\
            {%- for c in m.tool_calls or [] %}{%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}\
            {{- '<tool_call>\\n{\"name\": \"' ~ c.function.name ~ '\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}\\n</tool_call>' }}{%- endfor %}",
    },
    // A text of arguments as it is.
    Family {
        name: "Qwen3",
        calls: Calls::Json,
        thinks: true,
        begin: "",
        assistant: "{%- set content = m.content if m.content is string else '' %}{{- '\\n' }}\
            {%- if m.reasoning_content and loop.index0 > ns.last %}{{- '<think>\\n' ~ m.reasoning_content.strip('\\n') ~ '\\n</think>\\n\\n' ~ content.lstrip('\\n') }}\
            {%- else %}{{- content }}{%- endif %}\
            {%- for c in m.tool_calls or [] %}{%- if not loop.first or content %}{{- '\\n' }}{%- endif %}\
            {{- '<tool_call>\\n{\"name\": \"' ~ c.function.name ~ '\", \"arguments\": ' }}\
            {%- if c.function.arguments is string %}{{- c.function.arguments }}{%- else %}{{- c.function.arguments | tojson }}{%- endif %}\
            {{- '}\\n</tool_call>' }}{%- endfor %}",
    },
    Family {
        name: "Qwen3-Coder",
        calls: Calls::Xml,
        thinks: false,
        begin: "",
        assistant: "{%- if m.tool_calls %}{%- if m.content is string and m.content | trim | length > 0 %}{{- '\\n' ~ (m.content | trim) ~ '\\n' }}{%- endif %}\
            {%- for c in m.tool_calls %}{{- '\\n<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}\
            {%- for name, value in c.function.arguments | items %}{{- '<parameter=' ~ name ~ '>\\n' }}\
            {%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string %}\
            {{- value ~ '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}\
            {%- else %}{{- '\\n' ~ m.content }}{%- endif %}",
    },
    // Its prompts begin the thought.
    Family {
        name: "Qwen3.5",
        calls: Calls::Xml,
        thinks: true,
        begin: "<think>\\n",
        assistant: "{%- set content = (m.content or '') | trim %}{{- '\\n' }}\
            {%- if loop.index0 > ns.last or preserve_thinking %}{{- '<think>\\n' ~ (m.reasoning_content or '') | trim ~ '\\n</think>\\n\\n' ~ content }}\
            {%- else %}{{- content }}{%- endif %}\
            {%- for c in m.tool_calls or [] %}\
            {%- if loop.first and content %}{{- '\\n\\n' }}{%- elif not loop.first %}{{- '\\n' }}{%- endif %}\
            {{- '<tool_call>\\n<function=' ~ c.function.name ~ '>\\n' }}\
            {%- for name in c.function.arguments %}{%- set value = c.function.arguments[name] %}{{- '<parameter=' ~ name ~ '>\\n' }}\
            {%- set value = value | tojson if value is mapping or (value is sequence and value is not string) else value | string %}\
            {{- value ~ '\\n</parameter>\\n' }}{%- endfor %}{{- '</function>\\n</tool_call>' }}{%- endfor %}",
    },
    Family {
        name: "GLM-4.5",
        calls: Calls::Keys,
        thinks: true,
        begin: "",
        assistant: "{{- '\\n' }}{%- if m.reasoning_content and loop.index0 > ns.last %}{{- '<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' }}{%- endif %}\
            {{- m.content or '' }}{%- for c in m.tool_calls or [] %}{%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}\
            {{- '<tool_call>' ~ c.function.name ~ '\\n' }}{%- for k, v in c.function.arguments.items() %}\
            {{- '<arg_key>' ~ k ~ '</arg_key>\\n<arg_value>' }}{{- v | tojson(ensure_ascii=False) if v is not string else v }}{{- '</arg_value>\\n' }}{%- endfor %}\
            {{- '</tool_call>' }}{%- endfor %}",
    },
    Family {
        name: "MiniMax-M2",
        calls: Calls::Invokes,
        thinks: true,
        begin: "<think>\\n",
        assistant: "{{- '\\n' }}{%- if loop.index0 > ns.last %}{{- '<think>\\n' ~ (m.reasoning_content or '') ~ '\\n</think>\\n\\n' }}{%- endif %}\
            {{- m.content or '' }}{%- if m.tool_calls %}{%- if m.content %}{{- '\\n' }}{%- endif %}{{- '<minimax:tool_call>\\n' }}{%- for c in m.tool_calls %}\
            {{- '<invoke name=\"' ~ c.function.name ~ '\">\\n' }}{%- for k, v in c.function.arguments.items() %}\
            {{- '<parameter name=\"' ~ k ~ '\">' }}{{- v | tojson(ensure_ascii=False) if v is not string else v }}{{- '</parameter>\\n' }}{%- endfor %}\
            {{- '</invoke>\\n' }}{%- endfor %}{{- '</minimax:tool_call>' }}{%- endif %}",
    },
    Family {
        name: "Mistral 7B",
        calls: Calls::Mistral,
        thinks: false,
        begin: "",
        assistant: "{{- '\\n' }}{{- m.content or '' }}{%- if m.tool_calls %}{{- '[TOOL_CALLS][' }}{%- for c in m.tool_calls %}\
            {%- if c.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}\
            {{- '{\"name\": \"' ~ c.function.name ~ '\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}' }}\
            {%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}{%- endif %}",
    },
    Family {
        name: "Ministral 3",
        calls: Calls::Mistral,
        thinks: false,
        begin: "",
        assistant: "{{- '\\n' }}{{- m.content or '' }}{%- for c in m.tool_calls or [] %}{{- '[TOOL_CALLS]' ~ c.function.name ~ '[ARGS]' }}\
            {%- if c.function.arguments is string %}{{- c.function.arguments }}{%- else %}{{- c.function.arguments | tojson }}{%- endif %}{%- endfor %}",
    },
    Family {
        name: "Phi-4-mini",
        calls: Calls::List,
        thinks: false,
        begin: "",
        assistant: "{{- '\\n' }}{{- m.content or '' }}{%- if m.tool_calls %}{{- '<|tool_call|>[' }}{%- for c in m.tool_calls %}\
            {{- '{\"name\": \"' ~ c.function.name ~ '\", \"arguments\": ' ~ (c.function.arguments | tojson) ~ '}' }}\
            {%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']<|/tool_call|>' }}{%- endif %}",
    },
    Family {
        name: "DeepSeek-V3.1",
        calls: Calls::DeepSeek,
        thinks: false,
        begin: "",
        assistant: "{{- '\\n' }}{{- m.content or '' }}{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}{%- for c in m.tool_calls %}\
            {{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}\
            {%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}",
    },
    Family {
        name: "Kimi-K2",
        calls: Calls::Kimi,
        thinks: false,
        begin: "",
        assistant: "{{- '\\n' }}{{- m.content or '' }}{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for c in m.tool_calls %}\
            {{- '<|tool_call_begin|>' ~ c.id ~ '<|tool_call_argument_begin|>' }}\
            {%- if c.function.arguments is string %}{{- c.function.arguments }}{%- else %}{{- c.function.arguments | tojson }}{%- endif %}\
            {{- '<|tool_call_end|>' }}{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}",
    },
    // What tools answer is in the message that called them, and names are sorted.
    Family {
        name: "Gemma 4",
        calls: Calls::Gemma,
        thinks: false,
        begin: "",
        assistant: "{{- '\\n' }}{%- macro notation(v) -%}{%- if v is string %}{{- '<|\"|>' ~ v ~ '<|\"|>' }}{%- elif v is boolean %}{{- 'true' if v else 'false' }}\
            {%- elif v is mapping %}{{- '{' }}{%- for k, w in v | dictsort %}{{- k }}:{{- notation(w) }}{%- if not loop.last %},{%- endif %}{%- endfor %}{{- '}' }}\
            {%- elif v is sequence %}{{- '[' }}{%- for w in v %}{{- notation(w) }}{%- if not loop.last %},{%- endif %}{%- endfor %}{{- ']' }}{%- else %}{{- v }}{%- endif %}{%- endmacro -%}\
            {%- for c in m.tool_calls or [] %}{{- '<|tool_call>call:' ~ c.function.name ~ '{' }}\
            {%- if c.function.arguments is mapping %}{%- for k, v in c.function.arguments | dictsort %}{{- k }}:{{- notation(v) }}{%- if not loop.last %},{%- endif %}{%- endfor %}\
            {%- elif c.function.arguments is string %}{{- c.function.arguments }}{%- endif %}{{- '}<tool_call|>' }}{%- endfor %}\
            {%- for r in m.tool_responses or [] %}{{- '<|tool_response>response:' ~ r.name ~ '{value:' ~ notation(r.response) ~ '}<tool_response|>' }}{%- endfor %}{{- m.content or '' }}",
    },
    // A template that knows nothing of tools.
    Family { name: "demo", calls: Calls::Json, thinks: false, begin: "", assistant: "{{- '\\n' ~ m.content }}" },
];

impl Family {
    fn template(&self) -> ChatTemplate {
        let example = match self.calls {
            Calls::Json => "<tool_call>\\n{}\\n</tool_call>",
            Calls::Xml => "<tool_call>\\n<function=f>\\n</function>\\n</tool_call>",
            _ => "",
        };
        let mut source =
            FRAME.replace("ASSISTANT", self.assistant).replace("BEGIN", self.begin).replace("EXAMPLE", example);
        if self.name == "demo" {
            let (begin, end) = (
                source.find("{%- if tools").unwrap(),
                source.find("{%- for m in messages %}{%- if m.role == 'assistant'").unwrap(),
            );
            source.replace_range(begin..end, "");
            source = source.replace("tool", "t00l");
        }
        ChatTemplate::parse(&source).unwrap()
    }

    /// An answer as the family writes it.
    fn write(&self, answer: &Answer) -> String {
        let mut text = String::new();
        if self.thinks && !answer.thought.is_empty() {
            let begin = if self.begin.is_empty() { "<think>\n" } else { "" };
            text += &format!("{begin}{}\n</think>\n\n", answer.thought);
        } else if !self.begin.is_empty() {
            text += "\n</think>\n\n";
        }
        text += &answer.content;
        if !matches!(self.calls, Calls::Json | Calls::Xml) {
            return text + &self.other_calls(answer);
        }
        for (i, (name, arguments)) in answer.calls.iter().enumerate() {
            let lines = match (i, self.calls) {
                (0, _) if answer.content.is_empty() && self.name == "Qwen3-Coder" => "",
                (0, _) if answer.content.is_empty() => "",
                (0, Calls::Xml) => "\n\n",
                _ => "\n",
            };
            text += lines;
            text += "<tool_call>\n";
            match self.calls {
                Calls::Json => {
                    let fields: Vec<String> = arguments
                        .iter()
                        .map(|(name, value)| format!("{}: {}", Value::from(name.as_str()), python(value)))
                        .collect();
                    text += &format!("{{\"name\": \"{name}\", \"arguments\": {{{}}}}}\n", fields.join(", "));
                }
                Calls::Xml => {
                    text += &format!("<function={name}>\n");
                    for (name, value) in arguments {
                        let value = match value {
                            Value::String(text) => text.clone(),
                            Value::Bool(true) => "True".into(),
                            Value::Bool(false) => "False".into(),
                            other => python(other),
                        };
                        text += &format!("<parameter={name}>\n{value}\n</parameter>\n");
                    }
                    text += "</function>\n";
                }
                _ => unreachable!("written by `other_calls`"),
            }
            text += "</tool_call>";
        }
        text
    }

    /// Calls with other marks, and what is before them.
    fn other_calls(&self, answer: &Answer) -> String {
        if answer.calls.is_empty() {
            return String::new();
        }
        let object = |arguments: &[(String, Value)]| {
            let field = |(name, value): &(String, Value)| format!("{}: {}", Value::from(name.as_str()), python(value));
            format!("{{{}}}", arguments.iter().map(field).collect::<Vec<_>>().join(", "))
        };
        let plain = |value: &Value| value.as_str().map_or_else(|| python(value), str::to_owned);
        let list = || {
            let one = |(name, arguments): &(String, Vec<(String, Value)>)| {
                format!("{{\"name\": \"{name}\", \"arguments\": {}}}", object(arguments))
            };
            format!("[{}]", answer.calls.iter().map(one).collect::<Vec<_>>().join(", "))
        };
        let line = if answer.content.is_empty() { "" } else { "\n" };
        let each = |begin: &dyn Fn(&str) -> String, value: &dyn Fn(&str, String) -> String, end: &str, gap: &str| {
            let one = |(name, arguments): &(String, Vec<(String, Value)>)| {
                let values: String = arguments.iter().map(|(name, v)| value(name, plain(v))).collect();
                begin(name) + &values + end
            };
            answer.calls.iter().map(one).collect::<Vec<_>>().join(gap)
        };
        match self.name {
            "GLM-4.5" => {
                let value = |name: &str, v| format!("<arg_key>{name}</arg_key>\n<arg_value>{v}</arg_value>\n");
                line.to_owned() + &each(&|name| format!("<tool_call>{name}\n"), &value, "</tool_call>", "\n")
            }
            "MiniMax-M2" => {
                let value = |name: &str, v| format!("<parameter name=\"{name}\">{v}</parameter>\n");
                let calls = each(&|name| format!("<invoke name=\"{name}\">\n"), &value, "</invoke>\n", "");
                format!("{line}<minimax:tool_call>\n{calls}</minimax:tool_call>")
            }
            "Mistral 7B" => format!("[TOOL_CALLS]{}", list()),
            "Ministral 3" => {
                let one = |(name, arguments): &(String, Vec<(String, Value)>)| {
                    format!("[TOOL_CALLS]{name}[ARGS]{}", object(arguments))
                };
                answer.calls.iter().map(one).collect()
            }
            "DeepSeek-V3.1" => {
                let one = |(name, arguments): &(String, Vec<(String, Value)>)| {
                    format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{}<｜tool▁call▁end｜>", object(arguments))
                };
                format!(
                    "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
                    answer.calls.iter().map(one).collect::<String>()
                )
            }
            "Gemma 4" => {
                let one = |(name, arguments): &(String, Vec<(String, Value)>)| {
                    let object = Value::Object(arguments.iter().cloned().collect());
                    format!("<|tool_call>call:{name}{}<tool_call|>", gemma_notation(&object))
                };
                answer.calls.iter().map(one).collect()
            }
            "Kimi-K2" => {
                let one = |i: usize| {
                    let (name, arguments) = (&answer.calls[i].0, object(&answer.calls[i].1));
                    format!(
                        "<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
                    )
                };
                let calls: String = (0..answer.calls.len()).map(one).collect();
                format!("<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>")
            }
            _ => format!("<|tool_call|>{}<|/tool_call|>", list()),
        }
    }
}

/// How a client sends arguments back.
#[derive(Clone, Copy, Debug)]
enum Client {
    /// As it got them.
    Same,
    /// Read, and written anew without spaces.
    Compact,
    /// As an object.
    Object,
}

fn echo(pieces: &[Piece], client: Client) -> Value {
    let (mut thought, mut content, mut calls): (String, String, Vec<(String, String)>) = Default::default();
    for piece in pieces {
        match piece {
            Piece::Thought(more) => thought += more,
            Piece::Text(more) => content += more,
            Piece::Call { index, name } => {
                assert_eq!(*index, calls.len());
                calls.push((name.clone(), String::new()));
            }
            Piece::Arguments { index, json } => calls[*index].1 += json,
        }
    }
    let mut message = json!({"role": "assistant", "content": content});
    if !thought.is_empty() {
        message["reasoning"] = thought.into();
    }
    if !calls.is_empty() {
        let call = |(name, arguments): &(String, String)| {
            let value: Value = serde_json::from_str(arguments).unwrap_or_else(|e| panic!("{arguments}: {e}"));
            let arguments = match client {
                Client::Same => Value::from(arguments.as_str()),
                Client::Compact => Value::from(value.to_string()),
                Client::Object => value,
            };
            json!({"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}})
        };
        message["tool_calls"] = calls.iter().map(call).collect();
    }
    message
}

/// The prompt, and the prompt of the next turn that begins with it and the answer.
fn assert_comes_back(family: &Family, template: &ChatTemplate, generated: &str, client: Client) {
    let (tools, extra) = (tools(), Map::new());
    let mut messages = vec![json!({"role": "system", "content": "Be kind."}), json!({"role": "user", "content": "Go"})];
    let prompt = |messages: &[Value]| {
        let dialogue =
            Dialogue { template: Some(template), tokenizer: tokenizer(), messages, tools: Some(&tools), extra: &extra };
        dialogue.prompt().unwrap().text().to_owned()
    };
    let before = prompt(&messages);
    let style = template.style();
    assert_eq!(style.calls, Some(family.calls), "{}", family.name);
    let opened = style.opened(tokenizer(), &tokenizer().encode(&before, false).unwrap());
    assert_eq!(opened != Opened::No, !family.begin.is_empty(), "{}", family.name);
    let mut parser = AnswerParser::new(style, Some(Arc::new(Tools::new(&tools))), opened);
    let mut pieces = parser.push(generated);
    pieces.extend(parser.finish());
    messages.push(echo(&pieces, client));
    if pieces.iter().any(|p| matches!(p, Piece::Call { .. })) {
        messages.push(json!({"role": "tool", "content": "done", "tool_call_id": "call_1"}));
    }
    let after = prompt(&messages);
    let calls = pieces.iter().any(|p| matches!(p, Piece::Call { .. }));
    let end = if calls && family.calls == Calls::Gemma { "<|tool_response>" } else { "<|im_end|>\n" };
    let expected = format!("{before}{generated}{end}");
    assert!(after.starts_with(&expected), "{}\n{after}\n--- expected\n{expected}", family.name);
}

fn templates() -> &'static [ChatTemplate] {
    static ALL: OnceLock<Vec<ChatTemplate>> = OnceLock::new();
    ALL.get_or_init(|| FAMILIES.iter().map(Family::template).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn what_was_generated_is_rendered_again(
        answer in answer(),
        which in 0..FAMILIES.len(),
        client in prop_oneof![Just(Client::Same), Just(Client::Compact), Just(Client::Object)],
    ) {
        let (family, template) = (&FAMILIES[which], &templates()[which]);
        if family.calls == Calls::Gemma {
            // Its templates write calls before the text.
            prop_assume!(answer.content.is_empty() || answer.calls.is_empty());
            prop_assume!(answer.calls.iter().flat_map(|(_, all)| all).all(|(_, value)| has_notation(value)));
        }
        assert_comes_back(family, template, &family.write(&answer), client);
    }
}

#[test]
fn arguments_come_back_as_they_were_spaced() {
    for (family, template) in FAMILIES.iter().zip(templates()) {
        let generated = match family.calls {
            Calls::Json => {
                "<tool_call>\n{\"name\": \"use\", \"arguments\": {\"n\" : 1.50,\n \"text\":\"\\u00e9\"}}\n</tool_call>"
            }
            Calls::Keys => {
                "<tool_call>use\n<arg_key>n</arg_key>\n<arg_value>1.50</arg_value>\n<arg_key>list</arg_key>\n<arg_value>[1,\n 2e3]</arg_value>\n</tool_call>"
            }
            Calls::Invokes => {
                "<minimax:tool_call>\n<invoke name=\"use\">\n<parameter name=\"n\">1.50</parameter>\n</invoke>\n</minimax:tool_call>"
            }
            Calls::Mistral if family.name == "Ministral 3" => {
                "[TOOL_CALLS]use[ARGS]{\"n\" : 1.50,\n \"text\":\"\\u00e9\"}"
            }
            Calls::Mistral => {
                "[TOOL_CALLS][{\"name\": \"use\", \"arguments\": {\"n\" : 1.50,\n \"text\":\"\\u00e9\"}}]"
            }
            Calls::List => {
                "<|tool_call|>[{\"name\": \"use\", \"arguments\": {\"n\" : 1.50,\n \"text\":\"\\u00e9\"}}]<|/tool_call|>"
            }
            Calls::DeepSeek => {
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>use<｜tool▁sep｜>{\"n\" : 1.50,\n \"text\":\"\\u00e9\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            }
            Calls::Gemma => r#"<|tool_call>call:use{text:<|"|>é "{}<|"|>,n:1.50,list:[1,2e3]}<tool_call|>"#,
            Calls::Kimi => {
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.use:0<|tool_call_argument_begin|>{\"n\" : 1.50,\n \"text\":\"\\u00e9\"}<|tool_call_end|><|tool_calls_section_end|>"
            }
            Calls::Xml => {
                "<tool_call>\n<function=use>\n<parameter=n>\n1.50\n</parameter>\n<parameter=list>\n[1,\n 2e3]\n</parameter>\n</function>\n</tool_call>"
            }
            Calls::Dsml(_) | Calls::Xtml | Calls::Harmony => unreachable!("have tests of their own"),
        };
        let begin = if family.begin.is_empty() { "" } else { "Hm.\n</think>\n\n" };
        assert_comes_back(family, template, &format!("{begin}{generated}"), Client::Same);
    }
}

#[test]
fn thoughts_of_earlier_answers_are_kept_where_the_template_can() {
    let template = &templates()[3];
    let messages = [
        json!({"role": "user", "content": "a"}),
        json!({"role": "assistant", "content": "b", "reasoning_content": "hm"}),
        json!({"role": "user", "content": "c"}),
    ];
    let render = |extra: &Map<String, Value>| {
        let dialogue =
            Dialogue { template: Some(template), tokenizer: tokenizer(), messages: &messages, tools: None, extra };
        dialogue.prompt().unwrap().text().contains("hm")
    };
    assert!(template.style().preserves && render(&Map::new()));
    assert!(!render(json!({"preserve_thinking": false}).as_object().unwrap()));
}

#[test]
fn a_family_is_known_by_its_template() {
    let style = |source: &str| ChatTemplate::parse(source).unwrap().style();
    let plain = Style { thoughts: false, calls: Some(Calls::Json), native: false, preserves: false };
    assert_eq!(style("{{ messages[0].content }}"), plain);
    // What writes calls in another way is not taken for one that does not.
    assert_eq!(style("{{ tools }} <function_calls>"), Style { calls: None, native: true, ..plain });
    for (source, calls) in [
        ("{{ tools }} [TOOL_CALLS]", Calls::Mistral),
        ("{{ tools }} <tool_call>f<arg_key>", Calls::Keys),
        ("{{ tools }} <minimax:tool_call>", Calls::Invokes),
        ("{{ tools }} <|tool_call|>", Calls::List),
        ("{{ tools }} <|tool_call>", Calls::Gemma),
        ("{{ tools }} <｜tool▁calls▁begin｜>", Calls::DeepSeek),
        ("{{ tools }} <｜DSML｜function_calls>", Calls::Dsml(DsmlBlock::Functions)),
        ("{{ tools }} <｜DSML｜tool_calls>", Calls::Dsml(DsmlBlock::Tools)),
        ("{{ tools }} <|tool_calls_section_begin|>", Calls::Kimi),
    ] {
        assert_eq!(style(source), Style { calls: Some(calls), native: true, ..plain });
    }
}
