//! One contract for all engines. Unless a case is about one engine, it runs on io_uring, the pread
//! pool, the memory map and the simulated disk, as far as they work here.

mod copying;
mod faults;
mod loading;
mod reading;
mod relayout;
mod scheduling;
mod straight;
mod support;
mod tracing;
mod uploading;
