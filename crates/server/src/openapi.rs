//! `/openapi.json`: what can be asked here and what is answered, as OpenAPI 3.1. Routes, and the requests that are read, describe themselves; answers,
//! which are made as JSON, have their schemas written beside the code that makes them ([`written`]).

use std::collections::BTreeMap;
use std::sync::LazyLock;

use axum::http::header;
use axum::response::IntoResponse;
use serde_json::{Value, json};
use utoipa::openapi::security::{ApiKey, ApiKeyValue, Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{Content, HeaderBuilder, InfoBuilder, OpenApi as Document, Ref, RefOr, Response, Schema};
use utoipa::{IntoResponses, Modify, OpenApi, PartialSchema};

use crate::app;
use crate::context::IGNORED;

/// A schema that is written down: `written! { Name, uses [Others], { .. } }`. `Name` becomes a type that only names it.
macro_rules! written {
    ($(#[doc = $doc:literal])* $name:ident, uses [$($other:ty),*], $json:tt) => {
        $(#[doc = $doc])*
        pub enum $name {}

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                crate::openapi::read(stringify!($name), concat!($($doc),*), serde_json::json!($json))
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
pub(crate) use written;

/// The type of what may be anything.
pub const ANY: [&str; 6] = ["object", "array", "string", "number", "boolean", "null"];

/// A schema from JSON, all of it: words that utoipa does not know would be lost without a sound.
pub fn read(name: &str, description: &str, mut json: Value) -> RefOr<Schema> {
    if !description.is_empty() {
        json["description"] = description.trim().into();
    }
    let schema: RefOr<Schema> = serde_json::from_value(json.clone()).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(serde_json::to_value(&schema).ok(), Some(json), "{name}");
    schema
}

written! {
    /// An error in the words of OpenAI's API.
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
                    "code": {"type": ["string", "null"], "description": "context_length_exceeded, invalid_api_key, model_not_found, rate_limit_exceeded, timeout, or nothing."},
                },
            },
        },
    }
}

written! {
    /// An error in the words of Anthropic's API: on its paths, and everywhere for requests with the header `anthropic-version`.
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

written! {
    /// An error in the words of Ollama's API.
    OllamaError, uses [], {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
}

const REFUSALS: [(&str, &str); 2] = [
    ("401", "The server has keys, and the request has none of them (`invalid_api_key`)."),
    ("403", "The server is not called by this name, or pages of this origin may not ask."),
];
const STATES: [(&str, &str); 2] = [
    ("500", "Something went wrong that is not the request's fault; the message says what."),
    (
        "503",
        "The model is being loaded, there is no room for more connections or bodies, the server ends, or its engine has; `retry-after` says when to ask again.",
    ),
];
const BODIES: [(&str, &str); 4] = [
    (
        "400",
        "The request is wrong, or asks for what cannot be done: `param` and the message name the field. A prompt that is too long is `context_length_exceeded`.",
    ),
    ("408", "The body took too long to come."),
    ("413", "The body has too many bytes: a megabyte and 64 bytes for each token of context are accepted."),
    ("415", "The body is compressed."),
];
const TURNS: [(&str, &str); 2] = [
    ("429", "Too many requests wait (`rate_limit_exceeded`); `retry-after` says when to ask again."),
    ("504", "The request took longer than `--request-timeout`."),
];

macro_rules! errors {
    ($($(#[$doc:meta])* $name:ident: $error:ident [$($of:expr),*];)*) => {
        $(
            $(#[$doc])*
            pub enum $name {}

            impl IntoResponses for $name {
                fn responses() -> BTreeMap<String, RefOr<Response>> {
                    let all = [$(&$of[..]),*].concat();
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
    /// Of what has a body and is computed by the model.
    Computing: Error [REFUSALS, STATES, BODIES, TURNS];
    /// Of what has a body alone.
    Reading: Error [REFUSALS, STATES, BODIES];
    /// Of what has none.
    Asking: Error [REFUSALS, STATES];
    /// Of what anybody may see who asks by the right name.
    Seeing: Error [REFUSALS[1..]];
    AnthropicComputing: AnthropicError [REFUSALS, STATES, BODIES, TURNS];
    AnthropicReading: AnthropicError [REFUSALS, STATES, BODIES];
    OllamaComputing: OllamaError [REFUSALS, STATES, BODIES, TURNS];
    OllamaReading: OllamaError [REFUSALS, STATES, BODIES];
    OllamaAsking: OllamaError [REFUSALS, STATES];
}

/// What every path has in common.
#[derive(OpenApi)]
#[openapi(
    components(schemas(Error, AnthropicError, OllamaError)),
    modifiers(&Common),
    tags(
        (name = "openai", description = "What OpenAI's clients ask. Any model name is served; answers name the model that there is."),
        (name = "anthropic", description = "What Anthropic's clients ask."),
        (name = "ollama", description = "What Ollama's clients ask."),
        (name = "tokens", description = "Text to tokens and back."),
        (name = "sessions", description = "Conversations of the prompt cache by name (`--prompt-cache`)."),
        (name = "server", description = "The server itself."),
        (name = "page", description = "A chat in the browser."),
    ),
)]
struct Base;

struct Common;

impl Modify for Common {
    fn modify(&self, document: &mut Document) {
        document.info = InfoBuilder::new()
            .title("Sluice")
            .version(env!("CARGO_PKG_VERSION"))
            .description(Some(
                "A language model behind HTTP. A field that may be left out may be null, and a whole number may be written with a point. A field that would change the answer and cannot be obeyed is refused with 400, by name; any other field \
                 that is not listed is taken, has no effect, and is named in the header `sluice-ignored`. A stream's schema is that of an event, or of the JSON on each line.",
            ))
            .build();
        let components = document.components.get_or_insert_default();
        let bearer = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
        let own = SecurityScheme::ApiKey(ApiKey::Header(ApiKeyValue::new("x-api-key")));
        components.add_security_scheme("bearer", bearer);
        components.add_security_scheme("x-api-key", own);
        // Either, and none where the server has no keys.
        let needs = |name: &str| utoipa::openapi::SecurityRequirement::new(name, [""; 0]);
        document.security = Some(vec![needs("bearer"), needs("x-api-key"), Default::default()]);
    }
}

/// What a router's routes are described by.
pub fn base() -> Document {
    Base::openapi()
}

static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
    let document = complete(app::routes().into_openapi());
    let mut document = serde_json::to_value(&document).expect("strings and lists");
    events(&mut document);
    document.to_string()
});

/// Describes a stream by its events, whose `data` is the JSON that the handlers name. utoipa has no words for that.
fn events(part: &mut Value) {
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
            fields.values_mut().for_each(events);
        }
        Value::Array(all) => all.iter_mut().for_each(events),
        _ => {}
    }
}

/// With what is the same for all operations, and paths as OpenAPI writes them.
fn complete(mut document: Document) -> Document {
    let header =
        |what: &str| RefOr::T(HeaderBuilder::new().schema(Some(String::schema())).description(Some(what)).build());
    let named = |path: String| path.replace("{*", "{");
    document.paths.paths = document.paths.paths.into_iter().map(|(path, item)| (named(path), item)).collect();
    for (path, item) in &mut document.paths.paths {
        let operations = [("get", &mut item.get), ("post", &mut item.post), ("delete", &mut item.delete)];
        for (method, operation) in operations {
            let Some(operation) = operation else { continue };
            // Handlers of different paths may be called alike.
            let words = path.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
            let words: Vec<&str> = [method].into_iter().chain(words).collect();
            operation.operation_id = Some(words.join("_"));
            for response in operation.responses.responses.values_mut() {
                if let RefOr::T(response) = response {
                    let id = header("The request's id: the client's `x-request-id`, or one made here.");
                    response.headers.insert("x-request-id".into(), id);
                    if operation.request_body.is_some() {
                        let ignored = header("Fields of the request that had no effect, where there are any.");
                        response.headers.insert(IGNORED.into(), ignored);
                    }
                }
            }
        }
    }
    document
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "server", responses(
    (status = 200, description = "What is described here.", body = Value, content_type = "application/json"), Asking,
))]
pub async fn document() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], DOCUMENT.as_str())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use axum::Router;
    use serde_json::json;

    use super::*;

    fn parsed() -> Value {
        serde_json::from_str(&DOCUMENT).unwrap()
    }

    #[test]
    fn every_route_is_described_and_nothing_else_is() {
        let document = parsed();
        let described: BTreeSet<&str> = document["paths"].as_object().unwrap().keys().map(String::as_str).collect();
        // A router does not say what its routes are, but to those who look for mistakes.
        let shown = format!("{:?}", Router::from(app::routes()));
        let named = shown.split('"').filter(|part| part.starts_with('/')).map(|path| path.replace("{*", "{"));
        let routes: BTreeSet<String> = named.filter(|path| !path.contains("__private__")).collect();
        let routes: BTreeSet<&str> = routes.iter().map(String::as_str).collect();
        assert_eq!(described, routes);
        for path in ["/v1/chat/completions", "/v1/messages", "/v1/models/{name}", "/openapi.json", "/page/{name}"] {
            assert!(described.contains(path), "{path}");
        }
    }

    #[test]
    fn whatever_is_referred_to_is_there() {
        fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
            match value {
                Value::Object(fields) => {
                    found.extend(fields.get("$ref").and_then(Value::as_str));
                    fields.values().for_each(|value| references(value, found));
                }
                Value::Array(all) => all.iter().for_each(|value| references(value, found)),
                _ => {}
            }
        }
        let document = parsed();
        assert_eq!(document["openapi"], "3.1.0");
        let mut found = BTreeSet::new();
        references(&document, &mut found);
        assert!(found.len() > 30);
        for reference in found {
            let pointer = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(pointer).is_some(), "{reference}");
        }
        let schemas = document["components"]["schemas"].as_object().unwrap();
        assert!(schemas.keys().all(|name| name.bytes().all(|b| b.is_ascii_alphanumeric())));
    }

    #[test]
    fn operations_say_who_may_ask_and_what_goes_wrong() {
        let document = parsed();
        assert_eq!(document["security"], json!([{"bearer": []}, {"x-api-key": []}, {}]));
        let chat = &document["paths"]["/v1/chat/completions"]["post"];
        assert!(chat["responses"]["200"]["content"]["text/event-stream"].is_object());
        for status in ["400", "401", "403", "408", "413", "429", "500", "503", "504"] {
            let schema = |path: &str| {
                document["paths"][path]["post"]["responses"][status]["content"]["application/json"]["schema"]["$ref"]
                    .clone()
            };
            assert_eq!(schema("/v1/chat/completions"), "#/components/schemas/Error", "{status}");
            assert_eq!(schema("/v1/messages"), "#/components/schemas/AnthropicError", "{status}");
        }
        let operations =
            document["paths"].as_object().unwrap().values().flat_map(|item| item.as_object().unwrap().values());
        let ids: Vec<&Value> = operations.map(|operation| &operation["operationId"]).collect();
        let different: BTreeSet<&str> = ids.iter().map(|id| id.as_str().unwrap()).collect();
        assert_eq!(different.len(), ids.len(), "{ids:?}");
        // Whether the server is there may be asked without a key.
        assert_eq!(document["paths"]["/health"]["get"]["security"], json!([{}]));
    }
}
