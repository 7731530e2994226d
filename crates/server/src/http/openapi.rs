//! What describes the server as OpenAPI 3.1, for `/openapi.json`. Routes and request types describe themselves. Answers are made as JSON without types, so their
//! schemas are written next to the code that makes them, with [`json_schema`].

use std::collections::BTreeMap;

use serde_json::{Value, json};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{Content, HeaderBuilder, InfoBuilder, OpenApi as Document, Ref, RefOr, Response, Schema};
use utoipa::{IntoResponses, Modify, OpenApi, PartialSchema};

use crate::http::context::IGNORED_HEADER;

/// Declares a schema: `json_schema! { Name, uses [Others], { .. } }`. `Name` becomes an empty type that stands for it.
macro_rules! json_schema {
    ($(#[doc = $doc:literal])* $name:ident, uses [$($other:ty),*], $json:tt) => {
        $(#[doc = $doc])*
        pub enum $name {}

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                crate::http::openapi::parse_schema(stringify!($name), concat!($($doc),*), serde_json::json!($json))
            }
        }

        impl utoipa::ToSchema for $name {
            #[allow(unused_variables)]
            fn schemas(all: &mut Vec<(String, utoipa::openapi::RefOr<utoipa::openapi::Schema>)>) {
                $(
                    all.push((<$other as utoipa::ToSchema>::name().into_owned(), <$other as utoipa::PartialSchema>::schema()));
                    <$other as utoipa::ToSchema>::schemas(all);
                )*
            }
        }
    };
}
pub(crate) use json_schema;

/// The `type` of a schema for any value.
pub const ANY: [&str; 6] = ["object", "array", "string", "number", "boolean", "null"];

/// Parses a schema.
///
/// # Panics
/// If utoipa does not know all of its keywords; it would drop them silently.
pub fn parse_schema(name: &str, description: &str, mut json: Value) -> RefOr<Schema> {
    if !description.is_empty() {
        json["description"] = description.trim().into();
    }
    let schema: RefOr<Schema> = serde_json::from_value(json.clone()).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(serde_json::to_value(&schema).ok(), Some(json), "{name}");
    schema
}

json_schema! {
    /// An error in OpenAI's format.
    Error, uses [], {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string", "description": "invalid_request_error, authentication_error, permission_error, rate_limit_error, timeout_error, unavailable_error or server_error"},
                    "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                    "code": {"type": ["string", "null"], "description": "context_length_exceeded, invalid_api_key, model_not_found, rate_limit_exceeded, timeout, or null."},
                },
            },
        },
    }
}

json_schema! {
    /// An error in Anthropic's format: on its paths, and on all others for requests with the header `anthropic-version`.
    AnthropicError, uses [], {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"type": "string", "enum": ["error"]},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {
                    "type": {"type": "string", "description": "invalid_request_error, authentication_error, permission_error, not_found_error, request_too_large, rate_limit_error, timeout_error, overloaded_error or api_error"},
                    "message": {"type": "string"},
                },
            },
            "request_id": {"type": "string"},
        },
    }
}

json_schema! {
    /// An error in Ollama's format.
    OllamaError, uses [], {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
}

const REFUSALS: [(&str, &str); 2] = [
    ("401", "The server needs an API key, and the request has none or a wrong one (`invalid_api_key`)."),
    ("403", "The host or the origin is not allowed."),
];
const STATES: [(&str, &str); 2] = [
    ("500", "A fault of the server; the message says what happened."),
    (
        "503",
        "The model is still loading, there are too many connections or bodies, the server is shutting down, or the engine has failed. `retry-after` says when to try again.",
    ),
];
const BODIES: [(&str, &str); 4] = [
    (
        "400",
        "The request is invalid or asks for something that is not supported: `param` and the message name the field. For a prompt that is too long the code is `context_length_exceeded`.",
    ),
    ("408", "The body took too long to arrive."),
    ("413", "The body is too large: the limit is 1 MiB plus 64 bytes for each token of context."),
    ("415", "The body is compressed."),
];
const TURNS: [(&str, &str); 2] = [
    ("429", "The queue is full (`rate_limit_exceeded`). `retry-after` says when to try again."),
    ("504", "The request took longer than `--request-timeout`."),
];

macro_rules! errors {
    ($($(#[$doc:meta])* $name:ident: $error:ident [$($group:expr),*];)*) => {
        $(
            $(#[$doc])*
            pub enum $name {}

            impl IntoResponses for $name {
                fn responses() -> BTreeMap<String, RefOr<Response>> {
                    let all = [$(&$group[..]),*].concat();
                    let one = |(status, what): &(&str, &str)| {
                        let content = Content::new(Some(Ref::from_schema_name(stringify!($error))));
                        let response = Response::builder().description(*what).content("application/json", content);
                        ((*status).to_owned(), RefOr::T(response.build()))
                    };
                    all.iter().map(one).collect()
                }
            }
        )*
    };
}

errors! {
    /// Errors of requests that have a body and are computed by the model.
    ComputeErrors: Error [REFUSALS, STATES, BODIES, TURNS];
    /// Errors of requests that have a body and are not computed.
    BodyErrors: Error [REFUSALS, STATES, BODIES];
    /// Errors of requests without a body.
    QueryErrors: Error [REFUSALS, STATES];
    /// Errors of paths that need no key.
    PublicErrors: Error [REFUSALS[1..]];
    AnthropicComputeErrors: AnthropicError [REFUSALS, STATES, BODIES, TURNS];
    AnthropicBodyErrors: AnthropicError [REFUSALS, STATES, BODIES];
    OllamaComputeErrors: OllamaError [REFUSALS, STATES, BODIES, TURNS];
    OllamaBodyErrors: OllamaError [REFUSALS, STATES, BODIES];
    OllamaQueryErrors: OllamaError [REFUSALS, STATES];
}

/// What is the same for all paths.
#[derive(OpenApi)]
#[openapi(
    components(schemas(Error, AnthropicError, OllamaError)),
    modifiers(&DocumentInfo),
    tags(
        (name = "openai", description = "For OpenAI's clients. The `model` field is ignored, unless it names one of several models that the server offers; replies name the loaded model."),
        (name = "anthropic", description = "For Anthropic's clients."),
        (name = "ollama", description = "For Ollama's clients."),
        (name = "tokens", description = "Converts text to tokens and back."),
        (name = "sessions", description = "Named conversations in the prompt cache (`--prompt-cache`)."),
        (name = "server", description = "The server itself."),
        (name = "page", description = "A chat in the browser."),
    ),
)]
struct BaseDocument;

struct DocumentInfo;

impl Modify for DocumentInfo {
    fn modify(&self, document: &mut Document) {
        document.info = InfoBuilder::new()
            .title("Sluice")
            .version(env!("CARGO_PKG_VERSION"))
            .description(Some(
                "A language model server. Optional fields may be null, and integers may have a decimal point. A field that would change the answer but is not supported is refused with 400, by name. Any other unknown \
                 field is ignored and listed in the header `sluice-ignored`. A stream's schema describes one event, or the JSON on one line.",
            ))
            .build();
        let components = document.components.get_or_insert_default();
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        let own = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("x-api-key")));
        components.add_security_scheme("bearer", bearer);
        components.add_security_scheme("x-api-key", own);
        // Either of them; neither if the server has no keys.
        let needs = |name: &str| utoipa::openapi::SecurityRequirement::new(name, [""; 0]);
        document.security = Some(vec![needs("bearer"), needs("x-api-key"), Default::default()]);
    }
}

/// The document without routes.
pub fn base() -> Document {
    BaseDocument::openapi()
}

/// Wraps the schemas of event streams: handlers name the JSON in an event's `data`, and utoipa cannot express the event around it.
fn wrap_events(part: &mut Value) {
    match part {
        Value::Object(fields) => {
            if let Some(media) = fields.get_mut("text/event-stream") {
                let data = json!({
                    "type": "string", "contentMediaType": "application/json", "contentSchema": media["schema"].take(),
                });
                media["schema"] = json!({
                    "type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data},
                });
            }
            fields.values_mut().for_each(wrap_events);
        }
        Value::Array(all) => all.iter_mut().for_each(wrap_events),
        _ => {}
    }
}

/// The text of the document: with operation ids, response headers, event streams, and paths in OpenAPI's syntax.
pub fn complete(mut document: Document) -> String {
    let header =
        |what: &str| RefOr::T(HeaderBuilder::new().schema(Some(String::schema())).description(Some(what)).build());
    let named = |path: String| path.replace("{*", "{");
    document.paths.paths = document.paths.paths.into_iter().map(|(path, item)| (named(path), item)).collect();
    for (path, item) in &mut document.paths.paths {
        let operations = [("get", &mut item.get), ("post", &mut item.post), ("delete", &mut item.delete)];
        for (method, operation) in operations {
            let Some(operation) = operation else { continue };
            // Handlers' names are not unique; methods with paths are.
            let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
            let words: Vec<&str> = [method].into_iter().chain(words).collect();
            operation.operation_id = Some(words.join("_"));
            for response in operation.responses.responses.values_mut() {
                if let RefOr::T(response) = response {
                    let id = header("The request's id: the client's `x-request-id`, or one made here.");
                    response.headers.insert("x-request-id".into(), id);
                    if operation.request_body.is_some() {
                        let ignored = header("Fields of the request that were ignored, if there are any.");
                        response.headers.insert(IGNORED_HEADER.into(), ignored);
                    }
                }
            }
        }
    }
    let mut document = serde_json::to_value(&document).expect("strings and lists");
    wrap_events(&mut document);
    document.to_string()
}
