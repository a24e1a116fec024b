//! A conversation as text: what the model shall have read before its next answer.

use forebay_text::{ChatTemplate, RenderInput, Tokenizer};
use serde_json::{Map, Value, json};

/// The turns so far.
#[derive(Default)]
pub struct Conversation {
    messages: Vec<Value>,
    /// Without a template: all that was said, one after the other.
    text: String,
}

impl Conversation {
    /// Opens a turn with what the user says; returns the whole context as text. Without a template
    /// the text so far is continued as it is.
    pub fn open(&mut self, template: Option<&ChatTemplate>, user: &str) -> anyhow::Result<String> {
        let Some(template) = template else {
            return Ok(format!("{}{user}", self.text));
        };
        self.messages.push(json!({ "role": "user", "content": user }));
        let input = RenderInput {
            messages: Value::Array(self.messages.clone()),
            tools: None,
            add_generation_prompt: true,
            variables: Map::new(),
            now: None,
        };
        template.render(&input).map_err(|error| {
            self.messages.pop();
            error.into()
        })
    }

    /// Closes the turn with the answer that was shown.
    pub fn close(&mut self, user: &str, answer: &str) {
        if self.messages.is_empty() {
            self.text.push_str(user);
            self.text.push_str(answer);
        } else {
            self.messages.push(json!({ "role": "assistant", "content": answer }));
        }
    }

    /// Forgets a turn that failed.
    pub fn abandon(&mut self) {
        if self.messages.last().is_some_and(|message| message["role"] == "user") {
            self.messages.pop();
        }
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        *self = Conversation::default();
    }
}

/// Encodes a whole context. Special tokens written in it count as such: templates write them. The
/// token that begins a text is added where the tokenizer wants it and the template left it out.
pub fn encode(tokenizer: &Tokenizer, text: &str, templated: bool) -> anyhow::Result<Vec<u32>> {
    if !templated {
        return Ok(tokenizer.encode(text, true, true)?);
    }
    let mut ids = tokenizer.encode(text, false, true)?;
    if let Some(bos) = tokenizer.bos_id().filter(|_| tokenizer.adds_bos())
        && ids.first() != Some(&bos)
    {
        ids.insert(0, bos);
    }
    Ok(ids)
}

/// How many ids at the start of `wanted` the cache holds already. One is always left to process:
/// the next token needs the logits of the last.
pub fn reusable(cached: &[u32], wanted: &[u32]) -> usize {
    let common = cached.iter().zip(wanted).take_while(|(a, b)| a == b).count();
    common.min(wanted.len().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_template_text_goes_on() {
        let mut conversation = Conversation::default();
        assert_eq!(conversation.open(None, "Once").unwrap(), "Once");
        conversation.close("Once", " upon");
        assert_eq!(conversation.open(None, " a time").unwrap(), "Once upon a time");
        conversation.abandon();
        assert_eq!(conversation.open(None, " a").unwrap(), "Once upon a");
        conversation.reset();
        assert_eq!(conversation.open(None, "x").unwrap(), "x");
    }

    #[test]
    fn a_template_sees_all_turns() {
        let source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>";
        let template = ChatTemplate::from_source(source, "", "").unwrap();
        let mut conversation = Conversation::default();
        conversation.open(Some(&template), "a").unwrap();
        conversation.close("a", "b");
        conversation.open(Some(&template), "lost").unwrap();
        conversation.abandon();
        assert_eq!(
            conversation.open(Some(&template), "c").unwrap(),
            "<user>a<assistant>b<user>c<assistant>"
        );
    }

    #[test]
    fn the_cache_is_used_as_far_as_it_agrees() {
        assert_eq!(reusable(&[], &[1, 2]), 0);
        assert_eq!(reusable(&[1, 2, 3], &[1, 2, 4, 5]), 2);
        assert_eq!(reusable(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(reusable(&[1, 2, 3], &[1, 2]), 1);
        assert_eq!(reusable(&[1], &[]), 0);
    }
}
