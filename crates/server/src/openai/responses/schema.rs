//! Schemas of responses and their events.

use crate::http::openapi::{ANY, json_schema};
use crate::openai::logprobs::TokenLogprob;

json_schema! {
    ResponseObject, uses [OutputItem], {
        "type": "object",
        "required": [
            "id", "object", "created_at", "status", "background", "error", "incomplete_details", "instructions", "max_output_tokens", "metadata", "model", "output",
            "parallel_tool_calls", "previous_response_id", "reasoning", "store", "temperature", "text", "tool_choice", "tools", "top_p", "truncation", "usage",
        ],
        "properties": {
            "id": {"type": "string"},
            "object": {"type": "string", "enum": ["response"]},
            "created_at": {"type": "integer"},
            "completed_at": {"type": "integer"},
            "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete", "failed"]},
            "background": {"type": "boolean"},
            "error": {
                "type": ["object", "null"],
                "required": ["code", "message"],
                "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
            },
            "incomplete_details": {"type": ["object", "null"], "required": ["reason"], "properties": {"reason": {"type": "string", "enum": ["max_output_tokens"]}}},
            "instructions": {"type": ["string", "null"]},
            "max_output_tokens": {"type": ["integer", "null"]},
            "metadata": {"type": ANY, "description": "As in the request."},
            "model": {"type": "string"},
            "output": {"type": "array", "items": {"$ref": "#/components/schemas/OutputItem"}},
            "parallel_tool_calls": {"type": "boolean"},
            "previous_response_id": {"type": "null"},
            "reasoning": {"type": ANY, "description": "As in the request."},
            "store": {"type": "boolean"},
            "temperature": {"type": ["number", "null"]},
            "text": {"type": ANY, "description": "As in the request."},
            "tool_choice": {"type": ANY, "description": "As in the request."},
            "tools": {"type": "array", "items": {"type": ANY, "description": "As in the request."}},
            "top_p": {"type": ["number", "null"]},
            "truncation": {"type": "string", "enum": ["disabled"]},
            "usage": {
                "type": ["object", "null"],
                "required": ["input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"],
                "properties": {
                    "input_tokens": {"type": "integer"},
                    "input_tokens_details": {
                        "type": "object",
                        "required": ["cached_tokens", "cache_write_tokens"],
                        "properties": {"cached_tokens": {"type": "integer"}, "cache_write_tokens": {"type": "integer"}},
                    },
                    "output_tokens": {"type": "integer"},
                    "output_tokens_details": {"type": "object", "required": ["reasoning_tokens"], "properties": {"reasoning_tokens": {"type": "integer"}}},
                    "total_tokens": {"type": "integer"},
                },
            },
        },
    }
}

json_schema! {
    /// A thought, a text, or a tool call.
    OutputItem, uses [OutputPart], {
        "oneOf": [
            {
                "type": "object",
                "required": ["type", "id", "status", "summary"],
                "properties": {
                    "type": {"type": "string", "enum": ["reasoning"]},
                    "id": {"type": "string"},
                    "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete"]},
                    "summary": {"type": "array", "items": {"$ref": "#/components/schemas/OutputPart"}},
                    "content": {"type": "array", "items": {"$ref": "#/components/schemas/OutputPart"}},
                    "encrypted_content": {"type": "string", "description": "The thought in Base64, if `include` asks for it."},
                },
            },
            {
                "type": "object",
                "required": ["type", "id", "role", "status", "content"],
                "properties": {
                    "type": {"type": "string", "enum": ["message"]},
                    "id": {"type": "string"},
                    "role": {"type": "string", "enum": ["assistant"]},
                    "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete"]},
                    "content": {"type": "array", "items": {"$ref": "#/components/schemas/OutputPart"}},
                },
            },
            {
                "type": "object",
                "required": ["type", "id", "call_id", "name", "arguments", "status"],
                "properties": {
                    "type": {"type": "string", "enum": ["function_call"]},
                    "id": {"type": "string"},
                    "call_id": {"type": "string"},
                    "name": {"type": "string"},
                    "arguments": {"type": "string", "description": "A JSON object, with its fields in the order in which the model wrote them."},
                    "status": {"type": "string", "enum": ["in_progress", "completed", "incomplete"]},
                },
            },
        ],
    }
}

json_schema! {
    OutputPart, uses [TokenLogprob], {
        "type": "object",
        "required": ["type", "text"],
        "properties": {
            "type": {"type": "string", "enum": ["output_text", "reasoning_text", "summary_text"]},
            "text": {"type": "string"},
            "annotations": {"type": "array", "items": {"type": ANY}, "maxItems": 0},
            "logprobs": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}, "description": "If `include` asks for them."},
        },
    }
}

json_schema! {
    /// An event of a stream.
    ResponseEvent, uses [ResponseObject, OutputItem, OutputPart, TokenLogprob], {
        "type": "object",
        "required": ["type", "sequence_number"],
        "properties": {
            "type": {"type": "string", "enum": [
                "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed", "response.output_item.added",
                "response.output_item.done", "response.content_part.added", "response.content_part.done", "response.output_text.delta",
                "response.output_text.done", "response.reasoning_text.delta", "response.reasoning_text.done", "response.reasoning_summary_part.added",
                "response.reasoning_summary_part.done", "response.reasoning_summary_text.delta", "response.reasoning_summary_text.done",
                "response.function_call_arguments.delta", "response.function_call_arguments.done",
            ]},
            "sequence_number": {"type": "integer"},
            "response": {"$ref": "#/components/schemas/ResponseObject"},
            "output_index": {"type": "integer"},
            "item_id": {"type": "string"},
            "item": {"$ref": "#/components/schemas/OutputItem"},
            "content_index": {"type": "integer"},
            "summary_index": {"type": "integer"},
            "part": {"$ref": "#/components/schemas/OutputPart"},
            "delta": {"type": "string"},
            "text": {"type": "string"},
            "logprobs": {"type": "array", "items": {"$ref": "#/components/schemas/TokenLogprob"}, "description": "If `include` asks for them."},
            "name": {"type": "string"},
            "arguments": {"type": "string"},
        },
    }
}
