// A pasted error is found in the index of errors, and leads to its place there. Sphinx's search would want every word of it
// on a page, also names of layers and sizes. `ERRORS` holds the texts (error_index.py).
if (typeof Search !== "undefined") {
  const words = (text) => new Set(text.toLowerCase().match(/[a-z_]{2,}/g));
  const performSearch = Search._performSearch;
  // Shorter queries are topics.
  const LONG = 5, ENOUGH = 0.7, SHOWN = 3;

  const errors = (query) => {
    const given = words(query);
    const overlaps = ERRORS.map((text, place) => {
      const wanted = words(text);
      const common = [...wanted].filter((word) => given.has(word)).length;
      return { text, place, common, share: common / Math.min(wanted.size, given.size) };
    });
    const found = given.size < LONG ? [] : overlaps.filter(({ common, share }) => common > 1 && share >= ENOUGH);
    return found.sort((a, b) => b.common * b.share - a.common * a.share).slice(0, SHOWN);
  };

  Search._performSearch = (query, ...terms) => [
    ...performSearch(query, ...terms),
    // The last is shown first.
    ...errors(query).reverse().map(({ text, place }) =>
      ["errors", text, `#error-${place}`, null, 100, "errors.rst", SearchResultKind.title]),
  ];
  // Of equal matches, guides come first; tutorials, results and the reference are in folders.
  Scorer.score = (result) => result[4] + (result[0].includes("/") ? 0 : 0.5);
}
