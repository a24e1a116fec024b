//! The part of a model that is needed to talk about it while its weights are not in memory.

use std::path::Path;
use std::sync::Arc;

use forebay_format::Catalog;
use forebay_model::Architecture;
use forebay_text::{ChatTemplate, TextError, Tokenizer};

use crate::{EngineError, ModelInfo, Session};

/// Description, tokenizer and chat template of a model.
pub struct ModelText {
    pub info: ModelInfo,
    pub tokenizer: Arc<Tokenizer>,
    pub chat_template: Option<ChatTemplate>,
}

impl ModelText {
    /// Reads them from a model's files. No weights are read.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or is damaged, if the architecture is unknown, or if there is no tokenizer.
    pub fn open(model: &Path) -> Result<ModelText, EngineError> {
        let catalog = Catalog::open(model)?;
        let architecture = Architecture::from_catalog(&catalog)?;
        let tokenizer = optional_tokenizer(&catalog)?;
        let chat_template = ChatTemplate::from_catalog(&catalog)?;
        Ok(ModelText {
            info: ModelInfo::new(&catalog, &architecture),
            tokenizer: tokenizer
                .ok_or_else(|| EngineError::NoTokenizer { path: model.to_owned() })?,
            chat_template,
        })
    }

    /// Reads only the description.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read or is damaged, or if the architecture is unknown.
    pub fn info(model: &Path) -> Result<ModelInfo, EngineError> {
        let catalog = Catalog::open(model)?;
        let architecture = Architecture::from_catalog(&catalog)?;
        Ok(ModelInfo::new(&catalog, &architecture))
    }
}

impl Session {
    /// Returns the session's copies of the same.
    ///
    /// # Errors
    /// Returns an error if the model has no tokenizer.
    pub fn text(&self) -> Result<ModelText, EngineError> {
        Ok(ModelText {
            info: self.info().clone(),
            tokenizer: self.shared_tokenizer()?,
            chat_template: self.chat_template().cloned(),
        })
    }
}

/// Builds the tokenizer of a model, if it has one.
pub(crate) fn optional_tokenizer(catalog: &Catalog) -> Result<Option<Arc<Tokenizer>>, EngineError> {
    match Tokenizer::from_catalog(catalog) {
        Ok(tokenizer) => Ok(Some(Arc::new(tokenizer))),
        Err(TextError::NoTokenizerFile | TextError::MissingKey { key: "tokenizer.ggml.model" }) => {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}
