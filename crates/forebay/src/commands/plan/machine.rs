//! The machine that plans are for.

use std::path::{Path, PathBuf};

use anyhow::anyhow;
use forebay_engine::DeviceChoice;
use forebay_engine::doctor::{MachineProfile, ProfileError};
use forebay_engine::plan::{self, Rates};

use crate::failure::Outcome;
use crate::open;

/// A machine with its rates, measured or assumed.
pub struct Machine {
    pub cpu: String,
    pub processors: usize,
    pub rates: Rates,
    /// The file of another machine's profile.
    file: Option<PathBuf>,
    /// Reason why this machine has no measured rates.
    why_not: Option<&'static str>,
}

impl Machine {
    /// Returns the machine of the profile in `file`, or this one with the disk of `folder`. Without a profile of this machine,
    /// its rates are assumed.
    pub fn new(file: Option<&Path>, folder: &Path, device: DeviceChoice) -> Outcome<Machine> {
        if let Some(file) = file {
            let profile = profile(Some(file), folder)?;
            return Ok(Machine { file: Some(file.to_owned()), ..Machine::of(&profile)? });
        }
        match MachineProfile::of_folder(folder) {
            Ok(profile) => Ok(Machine::of(&profile)?),
            Err(why) => {
                let rates = Rates::unmeasured(plan::gpu_facts(device).is_some());
                let processors = std::thread::available_parallelism().map_or(1, usize::from);
                let cpu = "this machine".to_owned();
                Ok(Machine { cpu, processors, rates, file: None, why_not: Some(why) })
            }
        }
    }

    fn of(profile: &MachineProfile) -> anyhow::Result<Machine> {
        let machine = &profile.machine;
        Ok(Machine {
            cpu: machine.cpu.clone(),
            processors: machine.processors,
            rates: rates(profile)?,
            file: None,
            why_not: None,
        })
    }

    /// Returns true for this machine, whose free memory is known.
    pub fn is_here(&self) -> bool {
        self.file.is_none()
    }

    /// Returns why no speed is predicted.
    pub fn why_not_measured(&self) -> String {
        format!("{}: run forebay doctor", self.why_not.unwrap_or("no machine profile"))
    }

    /// Describes the machine.
    pub fn in_words(&self) -> String {
        let gpu = self.rates.gpu_name().map_or(String::new(), |gpu| format!(", {gpu}"));
        let of = match &self.file {
            Some(path) => format!(" ({})", path.display()),
            None => String::new(),
        };
        format!("{}, {} processors{gpu}{of}", self.cpu, self.processors)
    }
}

/// Reads the profile in `file`, or this machine's profile with the disk that `model` is on.
pub fn profile(file: Option<&Path>, model: &Path) -> anyhow::Result<MachineProfile> {
    if let Some(path) = file {
        open::check(path)?;
    }
    MachineProfile::find(file, model).map_err(|error| match error {
        ProfileError::NotMeasured { why } => {
            anyhow!("{why}: run forebay doctor on the model's disk first, or give --profile FILE")
        }
        error => error.into(),
    })
}

/// Returns the rates in a profile.
pub fn rates(profile: &MachineProfile) -> anyhow::Result<Rates> {
    Rates::new(profile).map_err(|why| anyhow!("{why}: run forebay doctor again"))
}
