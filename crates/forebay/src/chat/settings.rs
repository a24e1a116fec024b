//! The chat command `/set`: settings that can change during a chat.

use forebay_chat::Think;

use super::Chat;
use super::command::SETTINGS;
use crate::args::parse;

impl Chat<'_> {
    /// Changes one setting. The error names the accepted values.
    pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let sampling = &mut self.answer.sampling;
        match name.replace('-', "_").as_str() {
            "temperature" => sampling.temperature = parse::non_negative(value)?,
            "top_p" => sampling.top_p = parse::probability(value)?,
            "min_p" => sampling.min_p = parse::probability(value)?,
            "repeat_penalty" => sampling.repeat_penalty = parse::positive(value)?,
            "top_k" => sampling.top_k = whole(value, 0)?,
            "seed" => sampling.seed = whole(value, 0)?,
            "max_tokens" if value == "none" => self.answer.max_tokens = None,
            "max_tokens" => {
                let most: u32 = whole(value, 1).map_err(|e| format!("{e}, or none"))?;
                self.answer.max_tokens = Some(most as usize);
            }
            "think" => {
                let think: Think = value.parse()?;
                let set = self.conversation.format().think(think).map_err(|e| e.to_string())?;
                self.conversation.variables.extend(set);
                self.think = Some(think);
            }
            _ => return Err("there is no such setting: /set lists them".to_owned()),
        }
        Ok(())
    }

    /// Lists all settings with their values.
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let sampling = &self.answer.sampling;
        let max_tokens = self.answer.max_tokens.map_or("none".to_owned(), |most| most.to_string());
        let values = [
            sampling.temperature.to_string(),
            sampling.top_p.to_string(),
            sampling.top_k.to_string(),
            sampling.min_p.to_string(),
            sampling.repeat_penalty.to_string(),
            sampling.seed.to_string(),
            max_tokens,
            self.think.map_or("(the template's default)", Think::name).to_owned(),
        ];
        SETTINGS.into_iter().zip(values).collect()
    }
}

fn whole<T: TryFrom<u64>>(text: &str, least: u64) -> Result<T, String> {
    let number = text.parse().ok().filter(|number| *number >= least);
    number
        .and_then(|number| T::try_from(number).ok())
        .ok_or_else(|| format!("must be a whole number of at least {least}"))
}
