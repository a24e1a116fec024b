//! Biases of scores by the distance of the key from the query (Inkling).

/// Biases that every query head mixes from profiles. A profile has a number for each distance.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RelativeBias<'a> {
    /// How much of each profile the heads of the rows take, `[rows, heads, rank]`.
    pub mixes: &'a [f32],
    /// Profiles `[rank, extent]`, from the farthest distance to the token itself. Keys farther away have no bias.
    pub profiles: &'a [f32],
    pub rank: usize,
}

impl RelativeBias<'_> {
    fn extent(&self) -> usize {
        self.profiles.len() / self.rank
    }

    /// Returns the biases of later heads: those behind the first `heads` heads of all rows.
    pub(super) fn heads_from(self, heads: usize) -> Self {
        RelativeBias { mixes: &self.mixes[heads * self.rank..], ..self }
    }

    /// Checks that there are mixes for so many heads of all rows.
    ///
    /// # Panics
    /// Panics if there are not.
    pub(super) fn check(&self, heads: usize) {
        let profiles = self.rank > 0 && self.profiles.len().is_multiple_of(self.rank);
        assert!(profiles && !self.profiles.is_empty(), "attention: profiles of biases");
        assert!(self.mixes.len() >= heads * self.rank, "attention: mixes of biases");
    }

    /// Writes the biases of the keys at `first`, `first + 1` ... for head number `head` of all rows, whose query is at `position`.
    /// Each is summed in the order of the profiles.
    pub(super) fn write(&self, head: usize, position: usize, first: usize, out: &mut [f32]) {
        out.fill(0.0);
        let extent = self.extent();
        let from = (position + 1).saturating_sub(extent).max(first);
        let to = (position + 1).min(first + out.len());
        if from >= to {
            return;
        }
        let out = &mut out[from - first..to - first];
        let column = extent - 1 - (position - from);
        let mixes = &self.mixes[head * self.rank..][..self.rank];
        for (mix, profile) in mixes.iter().zip(self.profiles.chunks_exact(extent)) {
            let profile = &profile[column..];
            out.iter_mut().zip(profile).for_each(|(out, profile)| *out += mix * profile);
        }
    }
}
