//! What is the same for devices of every maker.
//!
//! An address of device memory knows its device, how much memory follows it, and whether that memory still exists. What queues work checks all
//! three, so no work reaches other memory, memory that was freed, or memory of another device.

mod id;
mod lifetime;
mod ptr;

pub use id::DeviceId;
pub use lifetime::{Lifetime, Owner, while_alive};
pub use ptr::DevicePtr;
