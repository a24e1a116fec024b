//! A conversation of parsed messages.

use serde_json::{Value, json};

use crate::{ChatError, Message};

/// Messages of a conversation, oldest first. Instructions are the system and developer messages at
/// the beginning. All later messages form turns, each of which begins with a user message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    messages: Vec<Message>,
}

impl History {
    pub fn new(messages: Vec<Message>) -> History {
        History { messages }
    }

    pub fn messages(&self) -> &[Message] {
        &self.messages
    }

    pub fn push(&mut self, message: Message) {
        self.messages.push(message);
    }

    /// Returns true if the newest message is from the user and still needs an answer.
    pub fn ends_with_user(&self) -> bool {
        self.messages.last().is_some_and(|message| message.role == "user")
    }

    /// Removes every turn and keeps the instructions.
    pub fn clear(&mut self) {
        self.messages.truncate(self.instructions());
    }

    /// Returns the text of the system message, if the conversation has one.
    pub fn system(&self) -> Option<&str> {
        let first = self.messages.first().filter(|message| message.is_instruction());
        first.map(|message| message.content.as_str())
    }

    /// Sets or replaces the system message; `None` removes it.
    pub fn set_system(&mut self, text: Option<String>) {
        let count = self.instructions();
        let new = text.map(|text| Message::new("system", text));
        self.messages.splice(..count, new);
    }

    /// Returns the number of turns in the conversation.
    pub fn turns(&self) -> usize {
        self.messages.iter().filter(|message| message.role == "user").count()
    }

    /// Removes the oldest turn: its user message and everything up to the next one. Never removes
    /// the newest turn. Returns true if a turn was removed.
    pub fn drop_oldest_turn(&mut self) -> bool {
        let start = self.instructions();
        let is_user = |message: &Message| message.role == "user";
        let second = self.messages.iter().skip(start + 1).position(is_user);
        let Some(offset) = second else { return false };
        self.messages.drain(start..=start + offset);
        true
    }

    /// Removes everything after the newest user message, so that it can be answered again. Returns false, and changes
    /// nothing, if there is no such message or no answer.
    pub fn drop_newest_answer(&mut self) -> bool {
        let newest = self.messages.iter().rposition(|message| message.role == "user");
        let Some(length) = newest.map(|at| at + 1).filter(|at| *at < self.messages.len()) else {
            return false;
        };
        self.messages.truncate(length);
        true
    }

    /// Returns the conversation as a JSON object with `messages`, which `forebay render` accepts.
    pub fn to_json(&self) -> Value {
        json!({ "messages": self.messages.iter().map(Message::to_json).collect::<Vec<_>>() })
    }

    /// Reads a conversation from JSON.
    ///
    /// # Errors
    /// Returns the errors of [`Message::list_from_json`].
    pub fn from_json(value: &Value) -> Result<History, ChatError> {
        Message::list_from_json(value).map(History::new)
    }

    fn instructions(&self) -> usize {
        self.messages.iter().take_while(|message| message.is_instruction()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(roles: &[&str]) -> History {
        History::new(roles.iter().zip(0..).map(|(r, i)| Message::new(r, i.to_string())).collect())
    }

    fn contents(history: &History) -> String {
        history.messages().iter().map(|message| message.content.as_str()).collect()
    }

    #[test]
    fn the_oldest_turn_leaves_whole_and_the_system_message_stays() {
        let mut long = history(&["system", "user", "assistant", "tool", "assistant", "user"]);
        assert!(long.drop_oldest_turn());
        assert_eq!(contents(&long), "05");
        assert!(!long.drop_oldest_turn());
        assert_eq!(contents(&long), "05");

        let mut plain = history(&["user", "assistant", "user", "assistant", "user"]);
        assert_eq!(plain.turns(), 3);
        assert!(plain.drop_oldest_turn() && plain.drop_oldest_turn() && !plain.drop_oldest_turn());
        assert_eq!(contents(&plain), "4");
        assert!(!History::default().drop_oldest_turn());
    }

    #[test]
    fn the_newest_answer_leaves_with_its_tool_calls() {
        let mut chat =
            history(&["system", "user", "assistant", "user", "assistant", "tool", "assistant"]);
        assert!(chat.drop_newest_answer());
        assert_eq!(contents(&chat), "0123");
        assert!(!chat.drop_newest_answer());
        assert!(!history(&["system"]).drop_newest_answer());
        assert!(!History::default().drop_newest_answer());
    }

    #[test]
    fn the_system_message_is_set_replaced_and_removed() {
        let mut chat = history(&["user", "assistant"]);
        assert_eq!(chat.system(), None);
        chat.set_system(Some("A".into()));
        chat.set_system(Some("B".into()));
        assert_eq!((chat.system(), chat.messages().len()), (Some("B"), 3));
        chat.clear();
        assert_eq!(chat.messages().len(), 1);
        chat.set_system(None);
        assert!(chat.messages().is_empty());
    }

    #[test]
    fn a_saved_conversation_is_the_same_when_it_is_loaded() {
        let mut chat = history(&["system", "user", "assistant"]);
        chat.messages[2].reasoning = Some("why\n".into());
        assert_eq!(History::from_json(&chat.to_json()).unwrap(), chat);
    }
}
