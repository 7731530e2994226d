//! Grammars of calls, as each family writes them.

use std::fmt::Write;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::grammar::{Grammars, ToolCallRules, as_object, expression, literal, spaced};
use super::notation::Notation;
use crate::text::marks::{
    CALL, CALLED, DEEPSEEK_ARGUMENTS, DEEPSEEK_CALL, DEEPSEEK_CALLED, DEEPSEEK_CALLS, DEEPSEEK_CALLS_END, DSML,
    DSML_INVOKED, DSML_VALUED, GEMMA_CALL, GEMMA_CALLED, KEY, KEYED, KIMI_ARGUMENTS, KIMI_CALL, KIMI_CALLED,
    KIMI_CALLS, KIMI_CALLS_END, LIST, LISTED, MINIMAX_CALL, MINIMAX_CALLED, MISTRAL_ARGUMENTS, MISTRAL_CALL, VALUE,
    VALUED, XTML_MESSAGE_END, XTML_RESPONDED, XTML_TOOLS, XTML_TOOLS_END,
};
use crate::text::{Calls, DsmlBlock};

/// Calls in an answer, at most, if one must be made.
const MAX_CALLS: usize = 16;

/// In Lark: perhaps a line end.
const LINE: &str = "\"\\n\"?";

/// A family's way around calls.
struct Frame {
    /// What begins calls, and what ends them.
    begin: &'static str,
    end: Option<&'static str>,
    /// In Lark: what stands before the first call, where the answer begins with calls, and behind the last.
    lead: &'static str,
    trail: &'static str,
    /// In Lark: before the first tool, between two in one frame if there may be two, and behind the last.
    before: &'static str,
    between: Option<&'static str>,
    behind: &'static str,
    /// In Lark: between two frames, if there may be two.
    apart: Option<&'static str>,
}

/// How a family writes the parameters of a call that is no JSON.
struct Parameters<'a> {
    /// In Lark: what begins the call, and what ends it.
    head: String,
    tail: &'a str,
    /// In Lark: what begins the parameter of this name, which is a text or is not.
    begin: &'a dyn Fn(&str, bool) -> String,
    /// What ends a parameter, as text or as a token, and in Lark what may stand behind.
    end: &'a str,
    behind: &'a str,
    /// Words for true and false, where they are not JSON's.
    truths: Option<[&'a str; 2]>,
}

impl Grammars {
    fn frame(&self, calls: Calls) -> Result<Frame> {
        let frame =
            |begin, end| Frame { begin, end, lead: "", trail: "", before: "", between: None, behind: "", apart: None };
        Ok(match calls {
            Calls::Json | Calls::Xml => Frame {
                // Nemotron 3 ends a call with a line end.
                trail: if calls == Calls::Xml { LINE } else { "" },
                before: "\"\\n\"",
                behind: "\"\\n\"",
                apart: Some("\"\\n\""),
                ..frame(CALL, Some(CALLED))
            },
            // GLM-4.5 and 4.6 write line ends before calls, 4.7 does not.
            Calls::Keys => Frame { lead: LINE, apart: Some(LINE), ..frame(CALL, Some(CALLED)) },
            Calls::Invokes => Frame {
                lead: LINE,
                before: "\"\\n\"",
                between: Some("\"\\n\""),
                behind: "\"\\n\"",
                ..frame(MINIMAX_CALL, Some(MINIMAX_CALLED))
            },
            Calls::Mistral if self.is_token(MISTRAL_ARGUMENTS) => {
                Frame { apart: Some(""), ..frame(MISTRAL_CALL, None) }
            }
            Calls::Mistral => {
                Frame { before: "\" \"? \"[\"", between: Some("\", \""), behind: "\"]\"", ..frame(MISTRAL_CALL, None) }
            }
            Calls::List => {
                let end = Some(LISTED).filter(|end| self.is_token(end));
                Frame { before: "\"[\"", between: Some("\", \""), behind: "\"]\"", ..frame(LIST, end) }
            }
            Calls::Kimi => Frame { between: Some(""), ..frame(KIMI_CALLS, Some(KIMI_CALLS_END)) },
            Calls::DeepSeek => Frame { between: Some(LINE), ..frame(DEEPSEEK_CALLS, Some(DEEPSEEK_CALLS_END)) },
            Calls::Dsml(block) => {
                let [begin, end] = block.marks();
                let line = "\"\\n\"";
                Frame { lead: "\"\\n\\n\"", before: line, between: Some(line), behind: line, ..frame(begin, Some(end)) }
            }
            Calls::Xtml => Frame { between: Some(""), ..frame(XTML_TOOLS, Some(XTML_TOOLS_END)) },
            Calls::Gemma => Frame { apart: Some(""), ..frame(GEMMA_CALL, Some(GEMMA_CALLED)) },
            Calls::Harmony => bail!("calls of {calls:?} have a grammar of their own"),
        })
    }

    /// Text with calls anywhere. Their mark always begins a call.
    pub(super) fn within_text(&self, source: &mut String, calls: Calls, several: bool) -> Result<()> {
        let (times, begin) = (if several { "*" } else { "?" }, self.frame(calls)?.begin);
        if calls == Calls::Xtml {
            let [responded, end] = [XTML_RESPONDED, XTML_MESSAGE_END].map(|tag| self.mark(tag));
            writeln!(source, "start: TEXT? ({responded} call? {end})?\nTEXT: /(?s:.+)/")?;
        } else if self.is_token(begin) {
            // Text cannot contain the token.
            writeln!(source, "start: TEXT? (call TEXT?){times}\nTEXT: /(?s:.+)/")?;
        } else if let Some((before, _)) = self.around_dsml(begin) {
            let before = expression(before);
            writeln!(source, "start: (until call){times} TEXT?\nuntil: /(?s:.*){before}/")?;
            writeln!(source, "TEXT: /(?s:.+)/ & ~/(?s:.*){before}/")?;
        } else {
            let begin = expression(begin);
            writeln!(source, "start: (until inside){times} TEXT?\nuntil[lazy]: /(?s:.*){begin}/")?;
            writeln!(source, "TEXT: /(?s:.+)/ & ~/(?s:.*{begin}.*)/")?;
        }
        Ok(())
    }

    /// The Lark grammar of calls. `is_within_text`: the arguments of tools that are not strict are free.
    pub(super) fn calls(&self, called: &ToolCallRules, calls: Calls, is_within_text: bool) -> Result<String> {
        let tools = called.tools.as_array().filter(|tools| !tools.is_empty()).context("there are no tools to call")?;
        let mut source = String::new();
        let frame = self.frame(calls)?;
        let (mut lead, mut trail) = (frame.lead.to_owned(), frame.trail.to_owned());
        if calls == Calls::Xtml {
            self.check_xtml()?;
            [lead, trail] = [XTML_RESPONDED, XTML_MESSAGE_END].map(|tag| self.mark(tag));
        }
        let names: Vec<String> = (0..tools.len()).map(|i| format!("tool{i}")).collect();
        let more = |what: &str, between: Option<&str>| match between.filter(|_| called.several) {
            Some(between) => format!(" ({between} {what}){{0,{}}}", MAX_CALLS - 1),
            None => String::new(),
        };
        if !is_within_text {
            writeln!(source, "calls: {lead} call{} {trail}", more("call", frame.apart))?;
        }
        match self.around_dsml(frame.begin) {
            // The text before it ends with the rest of the mark.
            Some((_, behind)) if is_within_text => {
                writeln!(source, "call: {} {} inside", self.mark(DSML), literal(behind))?;
            }
            _ if !is_within_text || self.is_token(frame.begin) || calls == Calls::Xtml => {
                writeln!(source, "call: {} inside", self.mark(frame.begin))?;
            }
            _ => {}
        }
        let end = frame.end.map_or(String::new(), |end| self.mark(end));
        let (before, behind) = (frame.before, frame.behind);
        writeln!(source, "inside: {before} tool{} {behind} {end}", more("tool", frame.between))?;
        writeln!(source, "tool: {}", names.join(" | "))?;
        let mut notation = Notation::new(self);
        for (i, tool) in tools.iter().enumerate() {
            let function = tool.get("function").unwrap_or(tool);
            let name = function["name"].as_str().context("a tool has no name")?;
            let is_free = is_within_text && !called.strict.iter().any(|strict| strict == name);
            let schema = match &function["parameters"] {
                Value::Object(schema) if !schema.is_empty() && !is_free => Value::Object(schema.clone()),
                _ => json!({"type": "object"}),
            };
            let fits = |forbidden: &[char]| {
                ensure!(!name.contains(forbidden), "a tool cannot be called {name:?}");
                Ok(())
            };
            let object = |source: &mut String, before: &str, behind: &str| -> Result<()> {
                writeln!(source, "tool{i}: {before} args{i} {behind}")?;
                writeln!(source, "args{i}: %json {}", spaced(&as_object(schema.clone()))?)?;
                Ok(())
            };
            match calls {
                Calls::Mistral if self.is_token(MISTRAL_ARGUMENTS) => {
                    fits(&['{', '[', '\n'])?;
                    object(&mut source, &format!("{} {}", literal(name), self.mark(MISTRAL_ARGUMENTS)), "")?;
                }
                Calls::Json | Calls::List | Calls::Mistral => {
                    let head = format!("{{\"name\": {}, \"arguments\": ", Value::from(name));
                    object(&mut source, &literal(&head), "\"}\"")?;
                }
                Calls::Kimi => {
                    fits(&['<', ':', '\n'])?;
                    let [call, arguments, called] = [KIMI_CALL, KIMI_ARGUMENTS, KIMI_CALLED].map(|m| self.mark(m));
                    let head = literal(&format!("functions.{name}:"));
                    object(&mut source, &format!("{call} {head} /[0-9]{{1,3}}/ {arguments}"), &called)?;
                }
                Calls::Xtml => {
                    fits(&['<', '\n'])?;
                    self.xtml_call(&mut source, (i, is_free), name, &schema)?;
                }
                Calls::Gemma => {
                    fits(&['{', '<', '\n'])?;
                    let arguments = notation.rule(&mut source, &as_object(schema))?;
                    writeln!(source, "tool{i}: {} {arguments}", literal(&format!("call:{name}")))?;
                }
                Calls::Xml if is_free => {
                    fits(&['<', '>', '\n'])?;
                    writeln!(source, "tool{i}: {} tool{i}v", literal(&format!("<function={name}>\n")))?;
                    writeln!(source, "tool{i}v[lazy]: /(?s:.*)<\\/function>/")?;
                }
                Calls::Xml => {
                    fits(&['<', '>', '\n'])?;
                    let how = Parameters {
                        head: literal(&format!("<function={name}>\n")),
                        tail: "\"</function>\"",
                        begin: &|name, _| literal(&format!("<parameter={name}>\n")),
                        end: "\n</parameter>\n",
                        behind: "",
                        // As templates print them.
                        truths: Some(["True", "False"]),
                    };
                    self.parameters(&mut source, i, &schema, &how)?;
                }
                Calls::Keys => {
                    fits(&['<', '{', '\n'])?;
                    let [key, keyed, value] = [KEY, KEYED, VALUE].map(|mark| self.mark(mark));
                    let how = Parameters {
                        head: format!("{} \"\\n\"?", literal(name)),
                        tail: "",
                        begin: &|name, _| format!("{key} {} {keyed} \"\\n\"? {value}", literal(name)),
                        end: VALUED,
                        behind: "\"\\n\"?",
                        truths: None,
                    };
                    self.parameters_or_any(&mut source, (i, is_free), &schema, &how, &|any| {
                        format!("{key} {any} {keyed} \"\\n\"? {value}")
                    })?;
                }
                Calls::Invokes => {
                    fits(&['"', '<', '\n'])?;
                    let how = Parameters {
                        head: literal(&format!("<invoke name=\"{name}\">\n")),
                        tail: "\"</invoke>\"",
                        begin: &|name, _| literal(&format!("<parameter name=\"{name}\">")),
                        end: "</parameter>",
                        behind: "\"\\n\"",
                        truths: None,
                    };
                    self.parameters_or_any(&mut source, (i, is_free), &schema, &how, &|any| {
                        format!("\"<parameter name=\\\"\" {any} \"\\\">\"")
                    })?;
                }
                Calls::DeepSeek => {
                    fits(&['<', '`', '\n'])?;
                    let [call, arguments, called] =
                        [DEEPSEEK_CALL, DEEPSEEK_ARGUMENTS, DEEPSEEK_CALLED].map(|m| self.mark(m));
                    // As V3.1 writes it, or as V3 and R1 do.
                    writeln!(source, "tool{i}: {call} (bare{i} | fenced{i}) {called}")?;
                    writeln!(source, "bare{i}: {} {arguments} args{i}", literal(name))?;
                    let fence = literal(&format!("{name}\n```json\n"));
                    writeln!(source, "fenced{i}: \"function\" {arguments} {fence} args{i} \"\\n```\"")?;
                    writeln!(source, "args{i}: %json {}", spaced(&as_object(schema.clone()))?)?;
                }
                Calls::Dsml(block) => {
                    fits(&['"', '<', '\n'])?;
                    let parameter = self.mark("<｜DSML｜parameter name=\"");
                    // Without parameters, V3.2 writes an empty line.
                    let line = if block == DsmlBlock::Functions { "\"\\n\"? " } else { "" };
                    let how = Parameters {
                        head: self.mark(&format!("<｜DSML｜invoke name=\"{name}\">\n")),
                        tail: &(line.to_owned() + &self.mark(DSML_INVOKED)),
                        begin: &|name, is_text| {
                            format!("{parameter} {}", literal(&format!("{name}\" string=\"{is_text}\">")))
                        },
                        end: DSML_VALUED,
                        behind: "\"\\n\"",
                        truths: None,
                    };
                    self.parameters_or_any(&mut source, (i, is_free), &schema, &how, &|any| {
                        format!("{parameter} {any} \"\\\" string=\\\"\" (\"true\" | \"false\") \"\\\">\"")
                    })?;
                }
                Calls::Harmony => bail!("calls of {calls:?} have a grammar of their own"),
            }
        }
        Ok(source)
    }

    /// [`Grammars::parameters`], or any names and values where a tool is free. `any_begin`: what begins a parameter, given the rule of its name.
    fn parameters_or_any(
        &self,
        source: &mut String,
        (i, is_free): (usize, bool),
        schema: &Value,
        how: &Parameters,
        any_begin: &dyn Fn(&str) -> String,
    ) -> Result<()> {
        if !is_free {
            return self.parameters(source, i, schema, how);
        }
        let Parameters { head, tail, behind, .. } = how;
        let value = self.text(source, &format!("tool{i}v"), "", how.end)?;
        writeln!(source, "tool{i}: {head} tool{i}p* {tail}\ntool{i}p: {} {value} {behind}", any_begin("NAME"))?;
        if !source.contains("\nNAME: ") {
            writeln!(source, "NAME: /[^<>\"\\n]+/")?;
        }
        Ok(())
    }

    /// A rule `name` of a text of so many characters (such as `{0,5}`; nothing: any number) and the mark or text behind it; returns what to say for both.
    fn text(&self, source: &mut String, name: &str, times: &str, end: &str) -> Result<String> {
        let times = if times.is_empty() { "{0,}" } else { times };
        // Text cannot contain a token.
        if self.is_token(end) {
            writeln!(source, "{name}: /(?s:.{times})/")?;
            return Ok(format!("{name} {}", self.mark(end)));
        }
        if let Some((before, behind)) = self.around_dsml(end) {
            writeln!(source, "{name}: /(?s:.{times}){}/", expression(before))?;
            return Ok(format!("{name} {} {}", self.mark(DSML), literal(behind)));
        }
        writeln!(source, "{name}[lazy]: /(?s:.{times}){}/", expression(end))?;
        Ok(name.to_owned())
    }

    /// A tool's call with parameters: in the schema's order, of which some may be optional.
    fn parameters(&self, source: &mut String, i: usize, schema: &Value, how: &Parameters) -> Result<()> {
        let Parameters { head, tail, begin, end, behind, truths } = how;
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let properties: Vec<(&String, &Value)> = schema["properties"].as_object().into_iter().flatten().collect();
        let rule = |(j, (name, _)): (usize, &(&String, &Value))| {
            format!(" tool{i}p{j}{}", if required.contains(&name.as_str()) { "" } else { "?" })
        };
        let rules: String = properties.iter().enumerate().map(rule).collect();
        writeln!(source, "tool{i}: {head}{rules} {tail}")?;
        let ended = self.mark(end);
        for (j, (name, schema)) in properties.into_iter().enumerate() {
            ensure!(!name.contains(['<', '>', '"', '\n']), "a parameter cannot be called {name:?}");
            let words = schema["enum"].as_array().and_then(|all| all.iter().map(Value::as_str).collect());
            let words = words.filter(|words: &Vec<&str>| !words.is_empty());
            let is_text = words.is_some() || schema["const"].is_string() || schema["type"] == "string";
            let begin = begin(name, is_text);
            match (words, schema["const"].as_str(), schema["type"].as_str(), truths) {
                (Some(words), ..) => {
                    let words: Vec<String> = words.into_iter().map(literal).collect();
                    writeln!(source, "tool{i}p{j}: {begin} ({}) {ended} {behind}", words.join(" | "))?;
                }
                (_, Some(word), ..) => {
                    writeln!(source, "tool{i}p{j}: {begin} {} {ended} {behind}", literal(word))?;
                }
                (_, _, Some("string"), _) => {
                    let (least, most) = (schema["minLength"].as_u64().unwrap_or(0), schema["maxLength"].as_u64());
                    let most = most.map_or(String::new(), |most| most.to_string());
                    let text = self.text(source, &format!("tool{i}v{j}"), &format!("{{{least},{most}}}"), end)?;
                    writeln!(source, "tool{i}p{j}: {begin} {text} {behind}")?;
                }
                (_, _, Some("boolean"), Some([yes, no])) => {
                    writeln!(source, "tool{i}p{j}: {begin} (\"{yes}\" | \"{no}\") {ended} {behind}")?;
                }
                _ => {
                    writeln!(source, "tool{i}p{j}: {begin} tool{i}v{j} {ended} {behind}")?;
                    writeln!(source, "tool{i}v{j}: %json {}", spaced(schema)?)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use super::super::grammar::GrammarFormat;
    use super::*;
    use crate::text::Tokenizer;

    /// Whether answers are accepted, of a model that writes calls in this way, where a call must be made.
    fn check(calls: Calls, several: bool, accepted: &[&str], refused: &[&str]) {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let tokenizer = Arc::new(Tokenizer::load(&demo, None).unwrap());
        let grammars = Grammars::new(&tokenizer, &[2]).unwrap();
        let tools = json!([
            {"type": "function", "function": {"name": "feed", "parameters": {
                "type": "object", "required": ["who", "n"], "additionalProperties": false, "properties": {
                    "who": {"type": "string"}, "n": {"type": "integer"}, "how": {"enum": ["well", "badly"]},
                    "all": {"type": "array", "items": {"type": "object", "properties": {"x": {"type": "boolean"}}}},
                },
            }}},
            {"type": "function", "function": {"name": "wait"}},
        ]);
        let called = ToolCallRules { tools, several, must: true, strict: Vec::new() };
        let matcher = grammars.compile(&GrammarFormat::Text, Some(&called), Some(calls)).unwrap();
        let allows = |answer: &str| {
            let tokens = tokenizer.encode_plain(answer).unwrap();
            let mut matcher = matcher.clone();
            matcher.try_consume_tokens(&tokens).unwrap() == tokens.len() && matcher.is_accepting().unwrap()
        };
        accepted.iter().for_each(|answer| assert!(allows(answer), "{calls:?} refuses {answer}"));
        refused.iter().for_each(|answer| assert!(!allows(answer), "{calls:?} accepts {answer}"));
    }

    #[test]
    fn keys_and_values() {
        let one = "<tool_call>feed\n<arg_key>who</arg_key>\n<arg_value>a <b>\nc</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>";
        let short = "<tool_call>feed<arg_key>who</arg_key><arg_value></arg_value><arg_key>n</arg_key><arg_value>3</arg_value><arg_key>how</arg_key><arg_value>well</arg_value></tool_call>";
        let two = format!("{one}\n<tool_call>wait\n</tool_call>");
        check(
            Calls::Keys,
            true,
            &[one, short, &two],
            &["", "so", &one.replace(">3<", ">x<"), &one.replace("feed", "none")],
        );
        check(Calls::Keys, false, &[one, short], &[&two, &short.replace("well", "so")]);
    }

    #[test]
    fn invocations() {
        let feed = "<invoke name=\"feed\">\n<parameter name=\"who\">a</parameter>\n<parameter name=\"n\">3</parameter>\n</invoke>";
        let of = |inner: &str| format!("<minimax:tool_call>\n{inner}\n</minimax:tool_call>");
        let (one, two) = (of(feed), of(&format!("{feed}\n<invoke name=\"wait\">\n</invoke>")));
        check(Calls::Invokes, true, &[&one, &two], &["", feed, &one.replace(">3<", ">x<")]);
        check(Calls::Invokes, false, &[&one], &[&two]);
    }

    #[test]
    fn dsml() {
        let parameter = |name: &str, is_text: bool, value: &str| {
            format!("<｜DSML｜parameter name=\"{name}\" string=\"{is_text}\">{value}</｜DSML｜parameter>\n")
        };
        let invoke = |name: &str, inner: &str| format!("<｜DSML｜invoke name=\"{name}\">\n{inner}</｜DSML｜invoke>");
        let feed = invoke("feed", &(parameter("who", true, "a </b>\n\"c\"") + &parameter("n", false, "3")));
        let more = feed.replace("</｜DSML｜invoke>", &(parameter("how", true, "well") + "</｜DSML｜invoke>"));
        for (block, name) in [(DsmlBlock::Functions, "function_calls"), (DsmlBlock::Tools, "tool_calls")] {
            let of = |inner: &str| format!("\n\n<｜DSML｜{name}>\n{inner}\n</｜DSML｜{name}>");
            let (one, two) = (of(&feed), of(&format!("{feed}\n{}", invoke("wait", ""))));
            let refused = ["", feed.as_str(), &one.replace(">3<", ">x<"), &of(&more.replace("well", "so"))];
            check(Calls::Dsml(block), true, &[&one, &two, &of(&more)], &refused);
            check(Calls::Dsml(block), true, &[], &[&one.replacen("true", "false", 1)]);
            check(Calls::Dsml(block), false, &[&one], &[&two]);
        }
        let empty = format!("\n\n<｜DSML｜function_calls>\n{}\n</｜DSML｜function_calls>", invoke("wait", "\n"));
        check(Calls::Dsml(DsmlBlock::Functions), true, &[&empty], &[&empty.replace("function_calls", "tool_calls")]);
    }

    #[test]
    fn objects_between_marks() {
        let object = "{\"who\": \"a\", \"n\": 3}";
        let list = format!("[TOOL_CALLS][{{\"name\": \"feed\", \"arguments\": {object}}}]");
        let two = list.replace("}]", "}, {\"name\": \"wait\", \"arguments\": {}}]");
        check(Calls::Mistral, true, &[&list, &two], &["[TOOL_CALLS][]", &list.replace('3', "true")]);
        check(Calls::Mistral, false, &[&list], &[&two]);
        let list = list.replace("[TOOL_CALLS]", "<|tool_call|>");
        check(Calls::List, true, &[&list], &["[]", &list.replace("who", "whom")]);
        let kimi = format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.feed:0<|tool_call_argument_begin|>{object}<|tool_call_end|><|tool_calls_section_end|>"
        );
        check(Calls::Kimi, true, &[&kimi], &["", &kimi.replace("feed:0", "feed")]);
        let of = |call: &str| {
            let call = format!("<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>");
            [format!("<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"), call]
        };
        let [bare, one] = of(&format!("feed<｜tool▁sep｜>{object}"));
        let [fenced, _] = of(&format!("function<｜tool▁sep｜>feed\n```json\n{object}\n```"));
        let two = bare.replace(&one, &format!("{one}{one}"));
        check(Calls::DeepSeek, true, &[&bare, &fenced, &two], &["", &one, &fenced.replace("```json", "```")]);
        check(Calls::DeepSeek, false, &[&bare, &fenced], &[&two, &bare.replace('3', "true")]);
    }

    #[test]
    fn gemmas_notation() {
        let of = |inner: &str| format!("<|tool_call>call:feed{{{inner}}}<tool_call|>");
        let quoted = |text: &str| format!("<|\"|>{text}<|\"|>");
        let plain = format!("who:{},n:3", quoted("a, {b}: c"));
        let more = format!("{plain},how:{},all:[{{x:true}},{{}}]", quoted("well"));
        let two = format!("{}<|tool_call>call:wait{{any:[1,{{a:null}}]}}<tool_call|>", of(&plain));
        check(
            Calls::Gemma,
            true,
            &[&of(&plain), &of(&more), &of(&format!("{plain},all:[]")), &two],
            &[
                "",
                &of("n:3"),
                &of(&format!("{plain},")),
                &of(&plain.replace(":3", ":a")),
                &of(&more.replace("well", "so")),
            ],
        );
        check(Calls::Gemma, false, &[&of(&plain)], &[&two]);
    }
}
