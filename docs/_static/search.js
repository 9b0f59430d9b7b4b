// Sphinx's search drops a page that has some of the words that are stemmed to two letters ("used", "being") and not all of
// them. So the text of an error would not find the index of errors: such words count only where a page has them.
if (typeof Search !== "undefined") {
  const performTermsSearch = Search.performTermsSearch;
  Search.performTermsSearch = (terms, excluded) => {
    const { terms: words, titleterms: titles } = Search._index;
    const counts = (term) => term.length > 2 || Object.hasOwn(words, term) || Object.hasOwn(titles, term);
    return performTermsSearch(new Set([...terms].filter(counts)), excluded);
  };
}
