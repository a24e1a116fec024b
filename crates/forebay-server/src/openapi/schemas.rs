//! Schemas that no type gives: errors, and requests that are read field by field.

use std::collections::BTreeMap;

use utoipa::PartialSchema;
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{
    ArrayBuilder, ObjectBuilder, OneOfBuilder, Schema, SchemaType, Type,
};

use super::build::text;
use crate::anthropic;

pub const OPENAI_ERROR: &str = "OpenAiError";
pub const ANTHROPIC_ERROR: &str = "AnthropicError";
pub const OLLAMA_ERROR: &str = "OllamaError";

/// Adds the schemas of errors.
pub fn add_errors(schemas: &mut BTreeMap<String, RefOr<Schema>>) {
    let nullable = || {
        let kinds = [Type::String, Type::Null].into_iter().collect::<SchemaType>();
        ObjectBuilder::new().schema_type(kinds)
    };
    let openai = ObjectBuilder::new()
        .property("message", text())
        .property("type", text())
        .property("param", nullable())
        .property("code", nullable());
    let anthropic = ObjectBuilder::new().property("type", text()).property("message", text());
    let of = |error: RefOr<Schema>| ObjectBuilder::new().property("error", error).required("error");
    schemas.insert(OPENAI_ERROR.into(), of(openai.into()).into());
    schemas.insert(ANTHROPIC_ERROR.into(), of(anthropic.into()).property("type", text()).into());
    schemas.insert(OLLAMA_ERROR.into(), of(text()).into());
}

/// Returns the schema of a conversation whose prompt is asked for.
pub fn conversation() -> RefOr<Schema> {
    let list = || ArrayBuilder::new().items(ObjectBuilder::new());
    ObjectBuilder::new()
        .property("model", text())
        .property("messages", list())
        .property("tools", list())
        .required("messages")
        .into()
}

/// Returns the schema of an upload.
pub fn upload() -> RefOr<Schema> {
    let number = ObjectBuilder::new().schema_type(SchemaType::new(Type::Integer));
    let purpose = ObjectBuilder::new().schema_type(SchemaType::new(Type::String));
    ObjectBuilder::new()
        .property("purpose", purpose.description(Some("batch")))
        .property("file", ObjectBuilder::new().schema_type(SchemaType::new(Type::String)))
        .property("expires_after[anchor]", text())
        .property("expires_after[seconds]", number)
        .required("purpose")
        .required("file")
        .into()
}

/// Content of Anthropic's messages. Blocks of kinds that mean nothing here are ignored, so their list is open.
impl PartialSchema for anthropic::Content {
    fn schema() -> RefOr<Schema> {
        let block = ObjectBuilder::new().property("type", text()).required("type").description(
            Some("text, thinking, tool_use or tool_result; images and documents are refused"),
        );
        OneOfBuilder::new().item(text()).item(ArrayBuilder::new().items(block)).into()
    }
}

impl utoipa::ToSchema for anthropic::Content {
    fn name() -> std::borrow::Cow<'static, str> {
        "AnthropicContent".into()
    }
}
