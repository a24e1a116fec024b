//! Questions about the kinds of layers of a model.

use super::architecture::{Architecture, Mixer};
use super::recurrent::STATES_PER_SEQUENCE;

impl Architecture {
    /// Returns the numbers of the layers that keep keys and values.
    pub fn attention_layers(&self) -> impl Iterator<Item = usize> {
        let layers = self.layers.iter().enumerate();
        layers.filter(|(_, layer)| layer.mixer == Mixer::Attention).map(|(index, _)| index)
    }

    /// Returns the number of recurrent layers.
    pub fn recurrent_layers(&self) -> usize {
        self.layers.iter().filter(|layer| layer.mixer == Mixer::Recurrent).count()
    }

    /// Returns the number of a recurrent layer among those.
    pub fn recurrent_index(&self, layer: usize) -> usize {
        self.layers[..layer].iter().filter(|layer| layer.mixer == Mixer::Recurrent).count()
    }

    /// Returns the bytes of one state of a sequence: that of all recurrent layers after some token.
    pub fn state_bytes(&self) -> u64 {
        let floats = self.recurrent.map_or(0, |of| of.state_floats());
        (floats * self.recurrent_layers()) as u64 * 4
    }

    /// Returns the bytes of the states of so many sequences.
    pub fn states_bytes(&self, sequences: usize) -> u64 {
        self.state_bytes().saturating_mul((STATES_PER_SEQUENCE * sequences) as u64)
    }
}
