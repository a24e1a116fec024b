// Short values that the browser keeps: for this tab (`session`) or for all tabs (`local`). A browser may forbid both, and may have no room.

function area(name) {
  const memory = new Map();
  const use = (work, otherwise) => {
    try {
      return work(globalThis[name]);
    } catch {
      return otherwise();
    }
  };
  return {
    get: (key) => use((store) => store.getItem(key), () => null) ?? memory.get(key) ?? null,
    /** Keeps a value. Returns false if only this page will know it. */
    set(key, value) {
      memory.delete(key);
      return use((store) => (store.setItem(key, value), true), () => (memory.set(key, value), false));
    },
    remove(key) {
      memory.delete(key);
      use((store) => store.removeItem(key), () => {});
    },
  };
}

export const session = area("sessionStorage");
export const local = area("localStorage");
