//! The CSV form of published traces. Comment lines name model and layers; then each routed expert has one row.

use std::collections::BTreeMap;
use std::io::{self, BufRead, Read as _, Write};

use super::header::{EXPERT_BYTES_MAX, EXPERTS_MAX, LAYERS_MAX};
use super::reader::BATCH_TOKENS_MAX;
use super::{
    CHOICES_MAX, LookupOrder, NONE, Phase, RoutingError, RoutingHeader, RoutingLayer, RoutingTrace,
    Rows, Turn,
};

/// Longest line that is read as one; no line of a real trace is longer.
const LINE_BYTES_MAX: u64 = 1 << 16;

/// After the first `PLACES_UNQUESTIONED` choices, rows must name at least one choice in this many.
const PLACES_PER_ROW_MAX: usize = 64;
const PLACES_UNQUESTIONED: usize = 1 << 20;

impl RoutingTrace {
    /// Reads the CSV form. Comment lines `# model=… n_expert=N n_expert_used=N` and `# layer=N expert_bytes=N` come
    /// first. Each row describes one routed expert; its first columns are turn, phase (0 prompt, 1 generate), step,
    /// layer, slot, expert and weight.
    ///
    /// A turn's prompt is one batch, and each generated token is a batch of its own. Prompts come before their answers.
    /// The rows of a turn's prompt may be ordered by layer.
    ///
    /// # Errors
    /// Returns [`RoutingError::Line`] with the line number.
    pub fn from_csv(input: impl BufRead) -> Result<RoutingTrace, RoutingError> {
        let mut reader = Reader::default();
        let mut input = input;
        let mut text = String::new();
        for line in 1.. {
            text.clear();
            let wrong = |why: String| RoutingError::Line { line, why };
            let read = input.by_ref().take(LINE_BYTES_MAX).read_line(&mut text);
            match read {
                Ok(0) => break,
                Ok(_) => reader.line(text.trim()).map_err(wrong)?,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(wrong("is no text".into()));
                }
                Err(error) => return Err(error.into()),
            }
        }
        reader.finish()
    }

    /// Writes the CSV form, without the columns `residency` and `expert_bytes` after the weight. They describe the
    /// recording engine's cache, which is not part of a trace.
    ///
    /// # Errors
    /// Returns an error if `out` fails.
    pub fn write_csv(&self, out: &mut impl Write) -> io::Result<()> {
        let header = self.header();
        let one_line = |text: &str| text.split_whitespace().collect::<Vec<_>>().join("_");
        let most = |of: fn(&RoutingLayer) -> u32| header.layers.iter().map(of).max().unwrap_or(0);
        writeln!(out, "# route_trace v1")?;
        writeln!(
            out,
            "# model={} arch={} n_layer={} n_expert={} n_expert_used={}",
            one_line(&header.model),
            one_line(&header.architecture),
            header.layers.len(),
            most(|layer| layer.experts),
            most(|layer| layer.used),
        )?;
        for (index, layer) in header.layers.iter().enumerate() {
            if layer.experts > 0 {
                writeln!(out, "# layer={index} expert_bytes={}", layer.expert_bytes)?;
            }
        }
        writeln!(out, "turn,phase,step,layer,slot,expert,weight")?;
        let (mut key, mut step) = ((usize::MAX, Phase::Prompt), 0);
        for batch in self.batches() {
            if key != (batch.turn, batch.phase) {
                (key, step) = ((batch.turn, batch.phase), 0);
            }
            let phase = u8::from(batch.phase == Phase::Generate);
            for layer in 0..header.layers.len() {
                for (number, token) in batch.tokens.clone().enumerate() {
                    let weights = self.weights(token, layer);
                    for (slot, expert) in self.experts(token, layer).enumerate() {
                        let weight = weights.get(slot).copied().unwrap_or(0.0);
                        let (turn, step) = (batch.turn, step + number);
                        writeln!(
                            out,
                            "{turn},{phase},{step},{layer},{slot},{},{weight}",
                            expert.0
                        )?;
                    }
                }
            }
            step += batch.tokens.len();
        }
        Ok(())
    }
}

/// Reads the CSV form line by line.
#[derive(Default)]
struct Reader {
    model: String,
    architecture: String,
    experts: u32,
    used: u32,
    layers: Vec<RoutingLayer>,
    /// The trace, created at the first row.
    trace: Option<RoutingTrace>,
    /// Turn, phase and step (0 in a prompt) of the open batch.
    key: Option<(u64, Phase, u64)>,
    /// Choices and weights of the open batch, by step.
    open: BTreeMap<u64, (Vec<u16>, Vec<f32>)>,
    rows: usize,
    /// Number of choices allocated, named by a row or not.
    places: usize,
}

impl Reader {
    fn line(&mut self, line: &str) -> Result<(), String> {
        if let Some(comment) = line.strip_prefix('#') {
            return self.comment(comment);
        }
        if line.is_empty() || line.starts_with("turn,") {
            return Ok(());
        }
        self.row(line)
    }

    fn comment(&mut self, comment: &str) -> Result<(), String> {
        let mut layer = None;
        let mut bytes = 0;
        for (name, text) in comment.split_whitespace().filter_map(|field| field.split_once('=')) {
            let number =
                || text.parse::<u64>().map_err(|_| format!("{name}={text:?} is not a number"));
            match name {
                "model" => self.model = text.to_owned(),
                "arch" => self.architecture = text.to_owned(),
                "n_expert" => {
                    self.experts =
                        possible(number()?, EXPERTS_MAX.into(), "experts in a layer")? as u32
                }
                "n_expert_used" => {
                    self.used =
                        possible(number()?, EXPERTS_MAX.into(), "experts of a token")? as u32;
                }
                "layer" => {
                    layer =
                        Some(possible(number()?, LAYERS_MAX as u64 - 1, "as number of a layer")?)
                }
                "expert_bytes" => {
                    bytes = possible(number()?, EXPERT_BYTES_MAX, "bytes of an expert")?
                }
                _ => {}
            }
        }
        let Some(layer) = layer else { return Ok(()) };
        if self.trace.is_some() {
            return Err("a layer is described after the first row".to_owned());
        }
        if self.layers.len() <= layer as usize {
            let dense = RoutingLayer { experts: 0, used: 0, expert_bytes: 0 };
            self.layers.resize(layer as usize + 1, dense);
        }
        self.layers[layer as usize] = RoutingLayer {
            experts: self.experts,
            used: self.used.min(self.experts),
            expert_bytes: bytes,
        };
        Ok(())
    }

    fn row(&mut self, line: &str) -> Result<(), String> {
        let mut columns = line.split(',');
        let mut text = |name: &str| {
            columns.next().map(str::trim).ok_or_else(|| format!("the column {name} is missing"))
        };
        let number = |name: &str, text: &str| {
            text.parse::<u64>().map_err(|_| format!("{name} is {text:?}, not a number"))
        };
        let turn = number("turn", text("turn")?)?;
        let phase = match number("phase", text("phase")?)? {
            0 => Phase::Prompt,
            1 => Phase::Generate,
            other => return Err(format!("phase {other}: there are 0 (prompt) and 1 (generate)")),
        };
        let step = number("step", text("step")?)?;
        let layer = number("layer", text("layer")?)? as usize;
        let slot = number("slot", text("slot")?)? as usize;
        let expert = number("expert", text("expert")?)?;
        let weight = match text("weight") {
            Ok(weight) => weight.parse::<f32>().map_err(|_| format!("the weight is {weight:?}"))?,
            Err(_) => 0.0,
        };
        if !weight.is_finite() {
            return Err(format!("the weight is {weight}"));
        }
        let of = self.layers.get(layer).copied();
        let of = of.unwrap_or(RoutingLayer { experts: 0, used: 0, expert_bytes: 0 });
        if expert >= of.experts.into() {
            return Err(format!(
                "expert {expert} of layer {layer}, which has {} experts",
                of.experts
            ));
        }
        if slot >= of.used as usize {
            return Err(format!("slot {slot} of layer {layer}, where a token uses {}", of.used));
        }
        let key = (turn, phase, if phase == Phase::Prompt { 0 } else { step });
        if self.key != Some(key) {
            self.close_batch()?;
            self.begin(key)?;
        }
        self.put(step, layer, slot, expert as u16, weight)
    }

    fn begin(&mut self, key: (u64, Phase, u64)) -> Result<(), String> {
        let is_new_turn = self.key.is_none_or(|before| before.0 != key.0);
        if self.trace.is_none() {
            let (model, architecture) = (self.model.clone(), self.architecture.clone());
            let header =
                RoutingHeader::new(model, architecture, self.layers.clone(), LookupOrder::LastUse);
            let header =
                RoutingHeader { recorder: "unknown (CSV)".to_owned(), weights: true, ..header };
            header.check().map_err(|error| error.to_string())?;
            self.trace = Some(RoutingTrace::new(header));
        }
        let trace = self.trace.as_mut().expect("it was just made");
        if is_new_turn {
            trace.begin_turn(Turn { prompt_hash: None, prompt_tokens: 0 });
        }
        self.key = Some(key);
        Ok(())
    }

    fn put(
        &mut self,
        step: u64,
        layer: usize,
        slot: usize,
        expert: u16,
        weight: f32,
    ) -> Result<(), String> {
        let trace = self.trace.as_ref().expect("a batch has begun");
        self.rows += 1;
        let width = trace.width();
        let at = trace.offsets[layer] + slot;
        if !self.open.contains_key(&step) {
            self.places += width;
            if self.places > CHOICES_MAX || self.open.len() == BATCH_TOKENS_MAX as usize {
                return Err("there are more tokens than this program keeps in memory".to_owned());
            }
            // Without this limit, a few rows with scattered steps would take a lot of memory.
            if self.places > PLACES_PER_ROW_MAX * self.rows + PLACES_UNQUESTIONED {
                return Err("most layers of the tokens before are missing".to_owned());
            }
            self.open.insert(step, (vec![NONE; width], vec![0.0; width]));
        }
        let (choices, weights) = self.open.get_mut(&step).expect("it was just made");
        if choices[at] != NONE {
            return Err(format!("slot {slot} of layer {layer} is there twice for one token"));
        }
        choices[at] = expert;
        weights[at] = weight;
        Ok(())
    }

    fn close_batch(&mut self) -> Result<(), String> {
        let Some(trace) = &mut self.trace else { return Ok(()) };
        let Some((_, phase, _)) = self.key else { return Ok(()) };
        let (mut choices, mut weights) = (Vec::new(), Vec::new());
        let tokens = self.open.len();
        for (_, (ids, values)) in std::mem::take(&mut self.open) {
            choices.extend(ids);
            weights.extend(values);
        }
        trace.push(phase, Rows { tokens, choices: &choices, weights: &weights, scores: &[] })?;
        if let (Phase::Prompt, Some(turn)) = (phase, trace.turns.last_mut()) {
            turn.prompt_tokens += tokens as u32;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<RoutingTrace, RoutingError> {
        self.close_batch().map_err(|why| RoutingError::Line { line: 0, why })?;
        self.trace.ok_or_else(|| {
            RoutingError::NotATrace(
                "it has neither the binary form nor rows of the CSV form".into(),
            )
        })
    }
}

fn possible(number: u64, most: u64, what: &str) -> Result<u64, String> {
    match number <= most {
        true => Ok(number),
        false => Err(format!("{number} {what}, {most} are possible")),
    }
}
