#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| quant_fuzz::generation_settings(data));
