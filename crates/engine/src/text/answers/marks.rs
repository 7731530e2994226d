//! What model families write around thoughts and calls.

pub(crate) const THINK: &str = "<think>";
pub(crate) const THOUGHT: &str = "</think>";
pub(crate) const CALL: &str = "<tool_call>";
pub(crate) const CALLED: &str = "</tool_call>";

/// Mistral's.
pub(crate) const MISTRAL_THINK: &str = "[THINK]";
pub(crate) const MISTRAL_THOUGHT: &str = "[/THINK]";
pub(crate) const MISTRAL_CALL: &str = "[TOOL_CALLS]";
pub(crate) const MISTRAL_ID: &str = "[CALL_ID]";
pub(crate) const MISTRAL_ARGUMENTS: &str = "[ARGS]";

/// Around a list of calls: Phi-4-mini, and without an end Granite 3.
pub(crate) const LIST: &str = "<|tool_call|>";
pub(crate) const LISTED: &str = "<|/tool_call|>";

/// GLM's keys and values.
pub(crate) const KEY: &str = "<arg_key>";
pub(crate) const KEYED: &str = "</arg_key>";
pub(crate) const VALUE: &str = "<arg_value>";
pub(crate) const VALUED: &str = "</arg_value>";

/// Around MiniMax's calls.
pub(crate) const MINIMAX_CALL: &str = "<minimax:tool_call>";
pub(crate) const MINIMAX_CALLED: &str = "</minimax:tool_call>";

/// DeepSeek's: around all calls, around each, and before its arguments.
pub(crate) const DEEPSEEK_CALLS: &str = "<｜tool▁calls▁begin｜>";
pub(crate) const DEEPSEEK_CALLS_END: &str = "<｜tool▁calls▁end｜>";
pub(crate) const DEEPSEEK_CALL: &str = "<｜tool▁call▁begin｜>";
pub(crate) const DEEPSEEK_CALLED: &str = "<｜tool▁call▁end｜>";
pub(crate) const DEEPSEEK_ARGUMENTS: &str = "<｜tool▁sep｜>";

/// DSML's, which is a token of its own, and what it begins: DeepSeek-V3.2 and V4, which name the block of all calls differently.
pub(crate) const DSML: &str = "｜DSML｜";
pub(crate) const DSML_FUNCTIONS: &str = "<｜DSML｜function_calls>";
pub(crate) const DSML_FUNCTIONS_END: &str = "</｜DSML｜function_calls>";
pub(crate) const DSML_TOOLS: &str = "<｜DSML｜tool_calls>";
pub(crate) const DSML_TOOLS_END: &str = "</｜DSML｜tool_calls>";
pub(crate) const DSML_INVOKED: &str = "</｜DSML｜invoke>";
pub(crate) const DSML_VALUED: &str = "</｜DSML｜parameter>";

/// Kimi's.
pub(crate) const KIMI_CALLS: &str = "<|tool_calls_section_begin|>";
pub(crate) const KIMI_CALLS_END: &str = "<|tool_calls_section_end|>";
pub(crate) const KIMI_CALL: &str = "<|tool_call_begin|>";
pub(crate) const KIMI_CALLED: &str = "<|tool_call_end|>";
pub(crate) const KIMI_ARGUMENTS: &str = "<|tool_call_argument_begin|>";

/// XTML's, Kimi-K3's notation: tokens around tags, and the end of a message.
pub(crate) const XTML_OPEN: &str = "<|open|>";
pub(crate) const XTML_CLOSE: &str = "<|close|>";
pub(crate) const XTML_SEP: &str = "<|sep|>";
pub(crate) const XTML_END: &str = "<|end_of_msg|>";
/// Its tags.
pub(crate) const XTML_THINK: &str = "<|open|>think<|sep|>";
pub(crate) const XTML_THOUGHT: &str = "<|close|>think<|sep|>";
pub(crate) const XTML_RESPONSE: &str = "<|open|>response<|sep|>";
pub(crate) const XTML_RESPONDED: &str = "<|close|>response<|sep|>";
pub(crate) const XTML_TOOLS: &str = "<|open|>tools<|sep|>";
pub(crate) const XTML_TOOLS_END: &str = "<|close|>tools<|sep|>";
pub(crate) const XTML_CALLED: &str = "<|close|>call<|sep|>";
pub(crate) const XTML_VALUED: &str = "<|close|>argument<|sep|>";
pub(crate) const XTML_JSON: &str = "<|open|>json type=\"object\"<|sep|>";
pub(crate) const XTML_JSON_END: &str = "<|close|>json<|sep|>";
pub(crate) const XTML_MESSAGE_END: &str = "<|close|>message<|sep|>";

/// Gemma 4's: around thoughts, calls, and texts in calls.
pub(crate) const GEMMA_CHANNEL: &str = "<|channel>";
pub(crate) const GEMMA_THINK: &str = "<|channel>thought";
pub(crate) const GEMMA_THOUGHT: &str = "<channel|>";
pub(crate) const GEMMA_CALL: &str = "<|tool_call>";
pub(crate) const GEMMA_CALLED: &str = "<tool_call|>";
pub(crate) const GEMMA_QUOTE: &str = "<|\"|>";
